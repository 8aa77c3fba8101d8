"""Times of a profile: of which step, without hiccups, and what of a block counts as computed again."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain import profiler
from protrain.profiler.step import Step
from protrain.profiler.trace import _typical, sustained
from tests.profiler.test_trace import _batch, _Block, _Model


class _Slow(_Block):
    """A block that may be held up."""

    held_up_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.held_up_s)
        return super().forward(x)


def test_a_hiccup_in_one_of_many_alike_blocks_is_not_believed() -> None:
    blocks = [_Slow() for _ in range(5)]
    blocks[2].held_up_s = 0.05
    found = profiler.profile(nn.Sequential(*blocks), (torch.randn(4, 8),), device="cpu")
    assert len(found.blocks) == 5
    assert max(block.forward_ms for block in found.blocks) < 25.0


def test_recomputation_ends_with_the_last_saved_tensor() -> None:
    class Ending(_Block):
        """Its last product saves nothing but its factors, which are there before it: it is not computed again."""

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.03)
            hidden = torch.tanh(self.up(x))
            y = self.down(hidden)
            time.sleep(0.12)
            return y

    found = profiler.profile(nn.Sequential(*[Ending() for _ in range(3)]), (torch.randn(4, 8),), device="cpu")
    for block in found.blocks:
        assert block.forward_ms >= 150.0
        assert block.recompute_ms is not None
        assert 30.0 <= block.recompute_ms < 120.0
        assert block.backward_ms < 50.0


@pytest.mark.parametrize(
    ("seconds", "counted", "order"),
    [
        (0.0, "1", "1w"),
        (0.05, "1", "1w"),
        (0.08, "3", "1w23"),
        (0.12, "34", "1w234"),
        (10.0, "345", "1w2345"),
    ],
    ids=["on a CPU one", "a long one", "one behind another", "two behind another", "three, however short they are"],
)
def test_short_steps_are_queued_together_and_count_but_for_the_first(
    seconds: float, counted: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def steps() -> int:
        return sum(each.isdigit() for each in done)

    def step() -> str:
        done.append(str(steps() + 1))
        return done[-1]

    monkeypatch.setattr("protrain.profiler.trace.time", SimpleNamespace(perf_counter=lambda: 0.05 * steps()))
    assert "".join(sustained(step, lambda: done.append("w"), seconds=seconds)) == counted
    assert "".join(done) == order


def test_of_two_steps_the_lesser_times_count_and_of_three_the_middle_ones() -> None:
    assert _typical([[(10.0, 3.0), (5.0, 0.0)], [(20.0, 1.0), (4.0, 0.0)]]) == [(10.0, 1.0), (4.0, 0.0)]
    assert _typical([[(10.0, 3.0)], [(20.0, 1.0)], [(12.0, 2.0)]]) == [(12.0, 2.0)]


def test_a_hiccup_in_one_of_several_steps_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "protrain.profiler.trace.sustained", lambda step, wait, seconds: sustained(step, wait, seconds=60.0)
    )
    model = nn.Sequential(*[_Slow() for _ in range(3)])
    n_runs = 0

    def hold_up(*_: object) -> None:
        nonlocal n_runs
        n_runs += 1
        _Slow.held_up_s = 0.05 * (n_runs == 6)  # one step for memory, and five for times, of which this is the last

    monkeypatch.setattr(_Slow, "held_up_s", 0.0)
    model[0].register_forward_pre_hook(hold_up)
    found = profiler.profile(model, (torch.randn(4, 8),), device="cpu")
    assert n_runs == 6
    assert max(block.forward_ms for block in found.blocks) < 25.0


@pytest.mark.gpu
def test_on_a_gpu_short_steps_are_timed_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    run = Step.run

    def counted(step: Step, *args: Any) -> None:
        runs.append(step._measure)
        run(step, *args)

    monkeypatch.setattr(Step, "run", counted)
    monkeypatch.setattr("protrain.profiler.trace._SUSTAINED_S", 1e9)  # even where others keep the GPU busy
    # in fp32, as a GPU has no backward of this batch norm with 16-bit weights and fp32 statistics
    found = profiler.profile(_Model(), _batch(), device="cuda", dtype=torch.float32)
    assert runs == [True] + 5 * [False]
    assert all(block.forward_ms > 0 for block in found.blocks)
