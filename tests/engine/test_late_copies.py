"""The engine's bits when copies and host updates come at the worst moment that its own ordering allows."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    CKPT_SWAP,
    FEW_PLANS,
    NONE,
    SWAP,
    Batch,
    Loop,
    Run,
    Spec,
    Trainer,
    adamw,
    check_equal_to_plain,
    default_loss,
    wrap_under,
)
from tests.engine.late_streams import LateStreams, Watch
from tests.engine.lateness import Lateness

CPU = torch.device("cpu")
WIDTH = 16
SPECS = (
    *FEW_PLANS,
    Spec("none", "middle", (SWAP,), speculate=True),
    Spec("none", "all", (SWAP, NONE), small=True, packed=True),
    Spec("none", "least", (CKPT_SWAP,), speculate=True),
)
KINDS = [Lateness("late"), Lateness("early"), Lateness("random", 0)]


def make() -> nn.Module:
    return residual.make(WIDTH, depth=4)


def batches(count: int = 4) -> list[Batch]:
    return residual.batches(count)


@pytest.fixture(params=KINDS, ids=str)
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lateness]:
    """Engines of this test meet one kind of lateness."""
    kind = Lateness(request.param.schedule, request.param.seed)
    monkeypatch.setattr("protrain.engine.states.chunks._SLICE_ELEMENTS", 128)  # looks at the link between
    with kind.applied(monkeypatch):
        yield kind


def met(lateness: Lateness, name: str) -> tuple[Spec, ...]:
    """The plans that a test of this name meets with this kind of lateness; all names together meet every plan.

    Late copies come with a third of the plans and each other kind with one. Which ones changes with the name.
    """
    turn = len(name)
    first, step = {"late": (turn % 3, 3), "early": (turn % 7, 7), "random": ((turn + 3) % 7, 7)}[lateness.schedule]
    return SPECS[first::step]


def check(lateness: Lateness, run: Run, name: str, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """What ``run`` finds and leaves is that of the plain loop under every plan that the test meets."""

    def watched(model: nn.Module, optimizer: Any, data: Sequence[Batch]) -> Any:
        if not isinstance(optimizer, ProTrainOptimizer):
            return run(model, optimizer, data)
        # What it finds is the same for all kinds.
        with Watch(late_streams(optimizer)) if lateness.schedule == "late" else nullcontext():
            return run(model, optimizer, data)

    for optimizer in check_equal_to_plain(
        make, batches(), run=watched, dtype=dtype, specs=met(lateness, name), **options
    ):
        late_streams(optimizer).synchronize()


def late_streams(optimizer: ProTrainOptimizer) -> LateStreams:
    streams = optimizer._engine.streams
    assert isinstance(streams, LateStreams)
    return streams


# -- loops -------------------------------------------------------------------------------------------------------------


def two_forwards(model: nn.Module, batch: Batch) -> Tensor:
    return default_loss(model, batch) + default_loss(model, (batch[0].flip(0),)) * 0.5


def looked_at_between(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        before = default_loss(model, batch)
    with torch.inference_mode():
        model(batch[0][:2])
    return default_loss(model, batch) * (1 + before)


def looked_at_inside(model: nn.Module, batch: Batch) -> Tensor:
    loss = default_loss(model, batch)
    with torch.no_grad():
        default_loss(model, (batch[0][:4],))
    return loss


LOOPS = {
    "plain": Loop(),
    "two forwards": Loop(max_norm=0.5, loss=two_forwards),
    "evaluation between": Loop(loss=looked_at_between),
    "evaluation inside": Loop(loss=looked_at_inside),
    "accumulation": Loop(max_norm=0.5, accumulate=2),
    "accumulation without sync": Loop(accumulate=2, no_sync=True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, lateness: Lateness) -> None:
    loop = LOOPS[name]
    n_batches = 2 + loop.accumulate
    options: dict[str, Any] = {"accumulation": loop.accumulate, "tight": loop.accumulate > 1}
    check(lateness, lambda model, optimizer, data: loop.run(model, optimizer, batches(n_batches)), name, **options)


def test_float16_with_skipped_steps(lateness: Lateness) -> None:
    loop = Loop(max_norm=0.5, loss=lambda model, batch: default_loss(model, batch) * 8)  # two steps of four overflow
    check(lateness, loop.run, "fp16", dtype=torch.float16)


def test_updates_inside_backward(lateness: Lateness) -> None:
    loop = Loop(accumulate=2, no_sync=True)
    check(lateness, loop.run, "accumulation inside backward", step_during_backward=True, accumulation=2)


# -- what is done between the parts of a step --------------------------------------------------------------------------


def several_backwards(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> None:
    for batch in data[:2]:
        first, second = default_loss(model, batch), default_loss(model, (batch[0].flip(1),))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def inputs_get_gradients(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> list[float]:
    values = []
    for batch in data[:2]:
        x = batch[0].clone().requires_grad_()
        default_loss(model, (x,)).backward()
        (other,) = torch.autograd.grad(model(x).float().sum(), [x])
        assert x.grad is not None
        values += [float(x.grad.sum()), float(other.sum())]
        optimizer.step()
        optimizer.zero_grad()
    return values


def failures(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> list[float]:
    values = []
    block: Any = model.get_submodule("blocks.1")
    for number, batch in enumerate(data):
        if number in (1, 2):
            block.fails = "backward"
            with pytest.raises(ArithmeticError, match="backward fails"):
                default_loss(model, batch).backward()
            block.fails = ""
            if number == 2:
                with torch.no_grad():
                    values.append(float(default_loss(model, batch)))
            optimizer.zero_grad()
        default_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values


def states_between(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> list[float]:
    values = []
    for batch in data[:3]:
        values.append(sum(float(value.sum()) for value in model.state_dict().values()))
        default_loss(model, batch).backward()
        values.append(sum(float(value.sum()) for value in model.state_dict().values()))
        optimizer.step()
        values.append(float(optimizer.export_parameter("blocks.2.first.weight")["exp_avg"].sum()))
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.zero_grad()
    return values


BETWEEN: dict[str, Run] = {
    run.__name__.replace("_", " "): run
    for run in (
        several_backwards,
        inputs_get_gradients,
        failures,
        states_between,
    )
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between(name: str, lateness: Lateness) -> None:
    check(lateness, BETWEEN[name], name, accumulation=3 if name == "several backwards" else 1)


def test_a_model_is_dropped_while_copies_are_on_their_way(lateness: Lateness) -> None:
    for spec in met(lateness, "a dropped model"):
        model = make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=CPU)
        default_loss(wrapped, batches()[0]).backward()
        optimizer.step()
        with torch.no_grad():
            default_loss(wrapped, batches()[1])  # leaves uploads behind
        streams = lateness.streams[-1]
        del model, wrapped, optimizer
        gc.collect()
        streams.synchronize()


class Gated(nn.Module):
    """A residual block with a parameter of which large results are saved: a backward to the input alone skips them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ torch.tanh(self.weight).sin())


def test_swapped_activations_come_back_after_a_backward_that_skipped_some(lateness: Lateness) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> list[float]:
        found: list[Tensor] = []
        for batch in data:
            x = batch[0].clone().requires_grad_()
            loss = model(x).float().square().mean()
            found += torch.autograd.grad(loss, [x], retain_graph=True)
            loss.backward()
            assert x.grad is not None
            found.append(x.grad)
            optimizer.step()
            optimizer.zero_grad()
        return [float(value) for each in found for value in each.flatten()]

    def blocks() -> nn.Module:
        return nn.Sequential(Gated(), Gated(), Gated(), Gated())

    modes = [Spec("all", "least", (SWAP,)), Spec("none", "least", (SWAP, NONE)), Spec("none", "least", (CKPT_SWAP,))]
    data = [(x.repeat(1, WIDTH // 8),) for (x,) in batches(3)]
    check_equal_to_plain(blocks, data, run=run, specs=modes)
