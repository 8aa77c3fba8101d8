"""Averages of weights are those of torch on whole weights, and leave the training as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from protrain_kernels import split
from tests.distributed.pool import on_ranks
from tests.distributed.training import step
from tests.engine.harness import Spec, adamw, assert_same, default_loss, plain_run, states, wrap_under
from tests.engine.residual import batches, make

pytestmark = pytest.mark.xdist_group("ranks")  # which shares the processes of the other tests of several ranks

OFFLOADED = Spec("none", "least", "cn", speculate=True)
DECAY = 0.9


def run(model: nn.Module, optimizer: Any, batches: Sequence[Any]) -> list[float]:
    return [step(model, optimizer, batch) for batch in batches]


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    model.eval()
    loss = default_loss(model, batches()[0]).item()
    model.train()
    return loss


def averaged_by_torch(average: dict[str, Tensor], optimizer: Any) -> dict[str, Tensor]:
    """What AveragedModel makes of ``average`` and the fp32 weights of now."""
    masters = {name: optimizer.export_parameter(name)["master"] for name in optimizer.parameter_names()}
    return {name: torch.lerp(average.get(name, new), new, 1 - DECAY) for name, new in masters.items()}


def average(dtype: torch.dtype = torch.float32, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """Train and compare averages with those of torch. Returns the states of the training."""
    model = make()
    model, optimizer = wrap_under(OFFLOADED, model, adamw(model), batches()[0], dtype=dtype, world_size=size)
    torch.manual_seed(1)  # of dropout
    averaged, expected = protrain.AveragedWeights(model, DECAY), dict[str, Tensor]()
    for number, batch in enumerate(batches(6)[rank::size]):
        step(model, optimizer, batch)
        with torch.inference_mode(number == 0):
            averaged.update()
        expected, before = averaged_by_torch(expected, optimizer), evaluate(model)
        assert_same(averaged.state_dict(), expected)
        with averaged.applied():
            inside = evaluate(model)
            if size == 1:
                for name, value in model.named_parameters():
                    of_torch = expected[name].view(-1)
                    assert torch.equal(value.view(-1), of_torch if dtype is torch.float32 else split(of_torch)[0]), name
        assert evaluate(model) == before
    assert inside != before
    other = protrain.AveragedWeights(model, DECAY)
    other.load_state_dict(averaged.state_dict())
    for each in (averaged, other):
        each.update()
    assert_same(other.state_dict(), averaged.state_dict())
    return states(model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_averages_are_those_of_whole_weights_and_leave_the_training_as_it_is(dtype: torch.dtype) -> None:
    _, expected = plain_run(make, batches(6), run=run, dtype=dtype)
    assert_same(average(dtype), expected)


def average_on_rank(rank: int) -> None:
    average(rank=rank, size=2)


def test_two_ranks_have_the_averages_of_whole_weights() -> None:
    on_ranks(2, average_on_rank)


def test_misuse() -> None:
    model = make()
    with pytest.raises(ValueError, match="decay must be at least 0 and less than 1, not 1"):
        protrain.AveragedWeights(model, 1)
    given: Any = adamw(model)
    with pytest.raises(ValueError, match="decay must be at least 0 and less than 1, not AdamW"):
        protrain.AveragedWeights(model, given)  # as other libraries' averages take it
    with pytest.raises(ValueError, match=r"AveragedWeights needs a model that protrain\.wrap returned"):
        protrain.AveragedWeights(model).update()
    model, _ = wrap_under(OFFLOADED, model, adamw(model), batches()[0])
    averaged = protrain.AveragedWeights(model)
    with pytest.raises(MisuseError, match=r"no average yet: call update\(\)"), averaged.applied():
        pass
    with pytest.raises(ValueError, match="averages are of another model"):
        averaged.load_state_dict({"enter.weight": torch.zeros(1)})
