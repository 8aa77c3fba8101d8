"""Batches: names, tokens, casting, and the loss of an output."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protrain.common import batch as batches


@dataclass
class _Part:
    y: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2), "not Tensor; pass .* for a single input a tuple of one"),
        ({"a": 1}, "holds no tensor, but int: pass the inputs"),
        ((iter([]), {1}), "holds no tensor, but list_iterator, set: pass .* objects with a method to"),
        ({"x": _Part(y=torch.eye(2).to_sparse())}, r"input x\.y is a sparse_coo tensor"),
        ((torch.zeros(2), torch.eye(2).to_sparse_csr()), "input 1 is a sparse_csr tensor"),
        (
            {"x": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)},
            r"input x is a nested tensor, .* to_padded_tensor\(",
        ),
    ],
)
def test_a_wrong_batch_is_named(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches.check(batch)


def test_a_tensor_or_an_object_is_the_one_argument_and_others_are_batches_already() -> None:
    tensor, item = torch.zeros(2), SimpleNamespace(x=torch.zeros(3))
    for given in (tensor, item):
        (alone,) = batches.of_one(given)
        assert alone is given
    for batch in ({"x": tensor}, (tensor,), [tensor], None):
        assert batches.of_one(batch) is batch


@pytest.mark.parametrize(
    ("shape", "planned", "rows_first", "otherwise"),
    [
        ((2, 16), (2, 16), 1, 1),
        ((2, 32), (2, 16), 4, 4),  # attention grows with the square of the length
        ((4, 8), (2, 16), 1, 2),
        ((2, 6, 9), (2, 3, 3), 36, 36),  # an image of 6 times the pixels
        ((2, 2, 8), (4, 8), 1, 2),
        ((2, 3), (2, 0), 18, 18),
    ],
)
def test_how_much_more_memory_than_planned_a_shape_may_need(
    shape: tuple[int, ...], planned: tuple[int, ...], rows_first: float, otherwise: float
) -> None:
    assert batches.growth(shape, planned, rows_first=True) == rows_first
    assert batches.growth(shape, planned, rows_first=False) == otherwise


class _Cached(nn.Module):
    config = SimpleNamespace(use_cache=True)

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        return x


def test_caches_are_switched_off_unless_asked_for() -> None:
    assert batches.training_arguments(_Cached(), {"x": 1}) == {"x": 1, "use_cache": False}
    composite = _Cached()
    composite.config = SimpleNamespace(use_cache=False, text=SimpleNamespace(use_cache=True))
    assert batches.training_arguments(composite, {"x": 1}) == {"x": 1, "use_cache": False}
    composite.config.text.use_cache = False
    assert batches.training_arguments(composite, {"x": 1}) == {"x": 1}
    assert batches.training_arguments(_Cached(), {"use_cache": True}) == {"use_cache": True}
    assert batches.training_arguments(nn.Linear(1, 1), {"x": 1}) == {"x": 1}


def test_a_loss_is_taken_and_what_is_beside_it_gets_a_stand_in_unless_it_is_its_logits() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    logits = x * 2
    loss, other = torch.logsumexp(logits.float().view(-1), 0), (x * x).sum().reshape(1)
    assert batches.loss_of(SimpleNamespace(loss=loss)).equal(loss)
    assert batches.loss_of({"loss": loss, "logits": x}).equal(loss)
    assert batches.loss_of(loss).equal(loss)
    assert batches.loss_of((logits, loss)).equal(loss)
    assert batches.loss_of([loss, {"logits": logits, "aside": torch.ones(3)}]).equal(loss)
    assert batches.loss_of((logits, loss, other)).equal(loss + other[0])
    assert batches.loss_of((logits, other)).equal(other[0] + logits.log_softmax(-1).mean())
    assert batches.loss_of((x, other)).equal(other[0] + x.log_softmax(-1).mean()), "a leaf, and no node"
    stand_in = batches.loss_of((x, torch.zeros(4)))
    assert stand_in.equal(x.log_softmax(-1).mean().reshape(1).sum())
    stand_in.backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_an_output_without_gradient_says_so() -> None:
    with pytest.raises(ValueError, match="depends on no trainable parameter"):
        batches.loss_of(torch.zeros(3))


def test_an_own_copy_of_a_part_holds_what_the_part_holds() -> None:
    """A batch that is a slice of a data set keeps the whole set alive in training, and so it does in the profile."""
    whole = torch.arange(88, dtype=torch.float32).view(11, 8)
    given = (whole[:2], whole.t()[1], whole[3].expand(4, 8))
    copied = batches.fresh_copy(given)
    for ours, theirs in zip(copied, given, strict=True):
        assert torch.equal(ours, theirs)
    assert copied[0].untyped_storage().nbytes() == whole.nbytes
    copied[0].zero_()
    assert whole[0, 1] == 1.0
