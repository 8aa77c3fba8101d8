"""What the plan promised and what was measured."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protrain.common.quantities import format_bytes
from protrain.common.records import Record
from protrain.engine.activations.ledger import SimulatedLedger
from protrain.planning.tables import format_change, format_ms

if TYPE_CHECKING:
    from protrain.engine.engine import Engine
    from protrain.engine.updates.updates import Tally

_KEPT_STEPS = 200
_SLOW_HOST = 0.86  # of its predicted rate: below what plans reckon with ([Note: caution] in planning/rates/caution.py)
_LATE_STEP = 1.05  # of its predicted time


@dataclass(frozen=True, kw_only=True)
class Report(Record):
    """Time and bytes of a training so far. Times are wall-clock medians between step() calls; 0 before two steps."""

    plan: str
    steps: int
    step_ms: float
    predicted_step_ms: float
    device_bytes: int  # measured peak: the allocator's on a GPU, the ledger's on a CPU
    predicted_device_bytes: int
    host_bytes: int  # of the host arena
    predicted_host_bytes: int
    fetches: int  # chunk uploads issued
    early_updates: int  # done inside backward before step() was called
    redone_updates: int  # of those that a clipped or otherwise unforeseen step had done again
    host_gparams: float  # 1e9 parameters a second of the last whole updates on the host, beside all else; 0: none
    predicted_host_gparams: float

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the printed table: what belongs together in one, with units."""
        predicted = f"predicted {format_ms(self.predicted_step_ms)}"
        step = f"not measured before two steps, {predicted}"
        if self.step_ms:
            step = (
                f"{format_ms(self.step_ms)} in the median, {predicted} "
                f"(measured {format_change(self.step_ms, self.predicted_step_ms)})"
            )
        redone = f", {self.redone_updates:,} of them done again" if self.redone_updates else ""
        on_host = "none"
        if self.host_gparams:
            on_host = f"{self.host_gparams:.2f} G parameters a second, predicted {self.predicted_host_gparams:.2f}"
            if self.predicted_host_gparams:
                on_host += f" (measured {format_change(self.host_gparams, self.predicted_host_gparams)})"
            if self._waits_for_a_slow_host:
                on_host += "; `protrain calibrate`, while the machine is as busy as now, for plans that leave it less"
        return [
            ("plan", self.plan),
            ("steps", f"{self.steps:,}"),
            ("time of a step", step),
            (
                "device memory",
                f"{format_bytes(self.device_bytes)} at its peak, predicted {format_bytes(self.predicted_device_bytes)}",
            ),
            (
                "host memory",
                f"{format_bytes(self.host_bytes)} taken, predicted {format_bytes(self.predicted_host_bytes)}",
            ),
            ("chunk uploads", f"{self.fetches:,}"),
            ("early updates", f"{self.early_updates:,}{redone}"),
            ("AdamW on the host", on_host),
        ]

    @property
    def _waits_for_a_slow_host(self) -> bool:
        slow = self.host_gparams < _SLOW_HOST * self.predicted_host_gparams
        return slow and self.step_ms > _LATE_STEP * self.predicted_step_ms

    def __str__(self) -> str:
        return self.table()


class StepClock:
    """Wall-clock time between steps."""

    def __init__(self) -> None:
        self.steps = 0  # that changed weights
        self._last: float | None = None
        self.durations_ms: deque[float] = deque(maxlen=_KEPT_STEPS)

    def tick(self, *, updated: bool) -> None:
        """A step was called. One whose gradients overflowed has ``updated`` nothing."""
        self.steps += updated
        now = time.perf_counter()
        if self._last is not None:
            self.durations_ms.append((now - self._last) * 1e3)
        self._last = now


def make_report(
    engine: Engine, clock: StepClock, tally: Tally, *, device_bytes: int, predicted_host_gparams: float
) -> Report:
    """The report of ``engine``; ``device_bytes`` is what lies on the device for good."""
    if engine.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(engine.device)
    else:
        peak = engine.ledger.peak_bytes if isinstance(engine.ledger, SimulatedLedger) else device_bytes
    return Report(
        plan=str(engine.plan),
        steps=clock.steps,
        step_ms=statistics.median(clock.durations_ms) if clock.durations_ms else 0.0,
        predicted_step_ms=engine.plan.step_ms,
        device_bytes=peak,
        predicted_device_bytes=engine.plan.device_bytes,
        host_bytes=engine.arena.total_bytes,
        predicted_host_bytes=engine.plan.host_bytes,
        fetches=engine.buffers.fetches,
        early_updates=tally.adopted + tally.redone,
        redone_updates=tally.redone,
        host_gparams=_rate_of(tuple(tally.counted)),
        predicted_host_gparams=predicted_host_gparams,
    )


def _rate_of(updates: tuple[tuple[int, float], ...]) -> float:
    """1e9 elements a second of all of ``updates``, elements and seconds of each; 0 where there are none."""
    seconds = sum(took for _, took in updates)
    return sum(elements for elements, _ in updates) / seconds / 1e9 if seconds > 0 else 0.0
