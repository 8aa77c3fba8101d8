"""What the meta device is said to return is what it returns, remembered or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from protrain.profiler.meta_device import KnownIntegers, as_if_on_gpu
from protrain.profiler.operations import storage_key

BFLOAT = torch.bfloat16

# These make new tensors, and the second call of each is answered from memory.
MAKING: dict[str, Callable[[Tensor], Any]] = {
    "sum of two": lambda x: x + x,
    "sum with one row": lambda x: x + x[:1],
    "usual": torch.tanh,
    "of another type": lambda x: torch.tanh(x.to(BFLOAT)),
    "of another shape": lambda x: torch.tanh(x.view(8, 4)),
    "strided": lambda x: torch.tanh(x.t()),
    "expanded": lambda x: x[:1].expand(5, 8) * 2,
    "other type": lambda x: x.to(BFLOAT),
    "one number": lambda x: x.sum(),
    "several": lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5),
    "list": lambda x: torch.cat([x, x]),
    "without a tensor": lambda x: torch.ones(3, device="meta"),
    "empty": lambda x: x[:0] + 1,
}
# These are run each time.
OTHER: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(8, 4),
    "view by another name": lambda x: torch.ops.aten._unsafe_view(x, [8, 4]),
    "in place": lambda x: x.mul_(2),
    "into an argument": lambda x: torch.add(x, x, out=x),
    "values": lambda x: torch.ones(4, 8) * 2,
    "a number with a value": lambda x: x * torch.tensor(2.0),
}


def _form(tensor: Tensor, given: Tensor) -> tuple[Any, ...]:
    size_bytes, is_given = tensor.untyped_storage().nbytes(), storage_key(tensor) == storage_key(given)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, size_bytes, is_given


def test_operators_return_the_same_whether_or_not_others_were_called_before() -> None:
    x, calls = torch.empty(4, 8, device="meta"), {**MAKING, **OTHER}
    rounds = [{name: call(x) for name, call in calls.items()}]
    with as_if_on_gpu():
        rounds += [{name: call(x) for name, call in calls.items()} for _ in range(2)]
    for name in calls:
        results = [found[name] for found in rounds]
        assert {type(result) for result in results} == {type(results[0])}, name
        parts = [result if isinstance(result, tuple) else (result,) for result in results]
        forms = [[_form(part, x) for part in each] for each in parts]
        assert forms == [forms[0]] * 3, name
        keys = [storage_key(part) for each in parts for part in each]
        assert name in OTHER or len({*keys}) == len(keys), f"two results of {name} share a storage"


def test_attention_that_a_module_imported_by_its_name_is_fused_too() -> None:
    query = torch.empty(1, 2, 64, 8, device="meta", requires_grad=True)
    saved: list[int] = []

    def noted(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    usual = scaled_dot_product_attention
    with as_if_on_gpu(), torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        scaled_dot_product_attention(query, query, query, is_causal=True)
    assert 0 < max(saved) < 64 * 64, "no matrix of sequence x sequence is saved"
    assert scaled_dot_product_attention is usual is F.scaled_dot_product_attention


PACKED, ALONE = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]), torch.arange(5)[None]


@pytest.mark.parametrize(("positions", "packed"), [(PACKED, True), (ALONE, False)], ids=["packed", "alone"])
def test_questions_about_a_batch_s_integers_have_true_answers(positions: Tensor, packed: bool) -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    known = KnownIntegers()
    moved = known.moved(positions)
    with as_if_on_gpu(known):
        assert (masking.find_packed_sequence_indices(moved) is not None) is packed


def test_a_changed_tensor_is_not_known_any_more() -> None:
    known = KnownIntegers()
    moved = known.moved(torch.zeros(4, dtype=torch.int64))
    with as_if_on_gpu(known):
        last = moved[-1:]
        assert not bool((last == 1).all()), "it follows from the batch"
        moved.add_(1)
        assert bool((last == 1).all()), "nothing is known, and values are taken for regular"
