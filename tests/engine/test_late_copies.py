"""The engine's bits when copies and host updates come at the worst moment that its own ordering allows."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.engine import residual
from tests.engine.harness import FEW_PLANS, Batch, Spec, Trainer, check_equal_to_plain, default_loss
from tests.engine.late_streams import Watch
from tests.engine.lateness import Lateness
from tests.random_scripts.compare import case_of, compare

WIDTH = 16
SPECS = (
    *FEW_PLANS,
    Spec("none", "middle", "s", speculate=True),
    Spec("none", "all", "sn", small=True, packed=True),
    Spec("none", "least", "i", speculate=True),
)
SCHEDULES = ("late", "early", "random")


@pytest.fixture(params=SCHEDULES)
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lateness]:
    """Engines of this test meet one kind of lateness."""
    kind = Lateness(request.param, seed=0 if request.param == "random" else None)
    monkeypatch.setattr("protrain.engine.states.chunks._SLICE_ELEMENTS", 128)  # looks at the link between
    with kind.applied(monkeypatch):
        yield kind


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_random_scripts(spec: Spec, lateness: Lateness) -> None:
    """Every plan meets a script of its own with each kind of lateness."""
    case, script = case_of(SPECS.index(spec) + len(SPECS) * SCHEDULES.index(lateness.schedule))
    # What each operation uses is the same for all kinds. While it is watched, torch does not tell of such edits.
    is_watched = lateness.schedule == "late"
    script = [action for action in script if not (is_watched and action[0] == "edit_outside")]
    with Watch(lateness.streams) if is_watched else nullcontext():
        compare(replace(case, spec=spec), script)


def test_a_model_is_dropped_while_copies_are_on_their_way(lateness: Lateness) -> None:
    for spec in SPECS[::3]:
        model, optimizer = residual.wrapped(spec)
        default_loss(model, residual.batches()[0]).backward()
        optimizer.step()
        with torch.no_grad():
            default_loss(model, residual.batches()[1])  # leaves uploads behind
        streams = lateness.streams[-1]
        del model, optimizer
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

    modes = [Spec("all", "least", "s"), Spec("none", "least", "sn"), Spec("none", "least", "i")]
    data = [(x.repeat(1, WIDTH // 8),) for (x,) in residual.batches(3)]
    check_equal_to_plain(blocks, data, run=run, specs=modes)
