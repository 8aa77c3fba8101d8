"""Times of a profile: which steps count, how interruptions are left out, and what counts as recomputation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.profiler import step_times
from protrain.profiler.step_times import Segment, time_steps
from protrain.profiler.traced_step import TracedStep
from tests.profiler.test_trace import _batch, _Block, _Model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``clock.now_s`` is what the profile takes for the time. Nothing takes any, but what a test adds to it."""
    found = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: found.now_s))
    return found


def test_recomputation_ends_with_the_last_saved_tensor(clock: SimpleNamespace) -> None:
    class Ending(_Block):
        """A block whose last product saves only its factors, which exist before it. It is not recomputed."""

        def forward(self, x: Tensor) -> Tensor:
            clock.now_s += 0.03
            hidden = torch.tanh(self.up(x))
            y = self.down(hidden)
            clock.now_s += 0.12
            return y

    found = protrain.profile(nn.Sequential(*[Ending() for _ in range(3)]), (torch.randn(4, 8),), device="cpu")
    for block in found.blocks:
        assert (block.forward_ms, block.recompute_ms) == (pytest.approx(150.0), pytest.approx(30.0))
        assert block.backward_ms == pytest.approx(0.0)


class _Others(step_times.Together):
    """Ranks with numbers of their own."""

    def __init__(self, numbers: dict[str, float]) -> None:
        self.numbers = numbers

    def largest(self, what: str, number: float) -> float:
        return max(number, self.numbers.get(what, 0.0))


@pytest.mark.parametrize(
    ("sustained_ms", "compiling", "of_others", "counted", "order"),
    [
        pytest.param(0.0, None, {}, "1", "1w", id="on a CPU one"),
        pytest.param(50.0, None, {}, "2", "1w2w", id="a long one"),
        pytest.param(80.0, None, {}, "3", "1w23w", id="one queued behind another"),
        pytest.param(120.0, None, {}, "34", "1w234w", id="two"),
        pytest.param(10000.0, None, {}, "345", "1w2345w", id="three, however short they are"),
        pytest.param(180.0, None, {step_times.LASTED: 90.0}, "3", "1w23w", id="as of a rank whose step is longer"),
        pytest.param(180.0, None, {step_times.COMPILED: 1.0}, "456", "1w2w3456w", id="another rank has compiled"),
        pytest.param(0.0, 1, {}, "2", "1w2w", id="on a CPU none that compiles"),
        pytest.param(50.0, 1, {}, "3", "1w2w3w", id="a long one and none that compiles"),
    ],
)
def test_the_first_step_on_a_gpu_does_not_count_and_short_ones_are_queued_together(
    sustained_ms: float,
    compiling: int | None,
    of_others: dict[str, float],
    counted: str,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 50 ms are simulated. ``order`` says when each was queued, and with w when they were waited for."""
    done: list[str] = []

    def queue() -> list[Segment]:
        number = 1 + len(done) - done.count("w")
        done.append(str(number))
        return [Segment("forward", "block", start=100.0, recomputed=100.0 + number, end=150.0)]

    monkeypatch.setattr(step_times, "finish", lambda device: done.append("w"))
    monkeypatch.setattr(step_times, "graphs_compiled", lambda: 7 + min(compiling or 0, len(done)))
    how: Any = {"compiled": compiling is not None, "sustained_ms": sustained_ms, "together": _Others(of_others)}
    steps = time_steps(queue, torch.device("cuda" if sustained_ms else "cpu"), **how)
    assert "".join(done) == order
    assert [recomputation for [(_, recomputation)] in steps] == [float(number) for number in counted]
    assert all(whole == 50.0 for [(whole, _)] in steps)


def test_a_hiccup_in_one_of_several_steps_is_not_believed(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "protrain.profiler.trace.time_steps",
        lambda step, device, **options: time_steps(step, device, **{**options, "sustained_ms": 60000.0}),
    )
    n_runs = 0

    class Slow(_Block):
        def forward(self, x: Tensor) -> Tensor:
            clock.now_s += 0.051 if n_runs == 6 else 0.001
            return super().forward(x)

    def count(*_: object) -> None:
        nonlocal n_runs
        n_runs += 1

    model = nn.Sequential(*[Slow() for _ in range(3)])
    model[0].register_forward_pre_hook(count)
    found = protrain.profile(model, (torch.randn(4, 8),), device="cpu")
    assert n_runs == 6, "one step measures memory and five measure times, and the last of them is held up"
    assert [block.forward_ms for block in found.blocks] == pytest.approx([1.0] * 3)


@pytest.mark.gpu
def test_on_a_gpu_short_steps_are_timed_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    run = TracedStep.run

    def counted(step: TracedStep, *args: Any) -> None:
        runs.append(step._measure)
        run(step, *args)

    monkeypatch.setattr(TracedStep, "run", counted)
    monkeypatch.setattr("protrain.profiler.trace.SUSTAINED_MS", 1e12)  # true even if others keep the GPU busy
    # in fp32, because a GPU has no backward of this batch norm with 16-bit weights and fp32 statistics
    found = protrain.profile(_Model(), _batch(), device="cuda", dtype=torch.float32)
    assert runs == [True] + 5 * [False]
    assert all(block.forward_ms > 0 for block in found.blocks)
