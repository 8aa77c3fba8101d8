"""The report of a training: what the plan predicted, and what was measured."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch

from protrain.common.records import Record
from protrain.common.tables import format_bytes, format_change, format_ms
from protrain.engine.engine import Engine
from protrain.engine.updates.host_updates import UpdateState
from protrain.engine.weights.views import SimulatedLedger

_TIMED_STEPS = 200
_SETTLED_STEPS = 10  # by which blocks are compiled and caches are warm
_FAR_OFF = 0.2  # a step that differs by more of its predicted time was planned for another machine
_SLOW_HOST = 0.86  # times the predicted rate: a host that is slower than plans are made for


@dataclass(frozen=True, kw_only=True)
class Report(Record):
    """Time and bytes of a training so far. Times are wall-clock medians between step() calls; 0 before two steps."""

    plan: str
    steps: int
    step_ms: float
    predicted_step_ms: float
    device_bytes: int  # measured peak, by the allocator on a GPU and by the ledger on a CPU
    predicted_device_bytes: int
    host_bytes: int  # size of the host arena
    predicted_host_bytes: int
    fetches: int  # uploads of chunks, or of this rank's shards of them
    uploaded_bytes: int  # by them, from host memory
    received_bytes: int  # of weights, from other ranks
    sent_bytes: int  # of gradients, to other ranks
    speculative_updates: int  # updates done inside backward, before step() was called
    streamed_updates: int  # updates of chunks in host memory that the device did, as the host would have been late
    redone_updates: int  # speculative updates done again as the step was not as they had assumed
    host_gparams: float  # 1e9 parameters a second in the updates by the host, while the step ran; 0: none
    predicted_host_gparams: float

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the printed table, with units. Each figure is beside its prediction."""
        predicted = f"predicted {format_ms(self.predicted_step_ms)}"
        step = f"not measured before two steps, {predicted}"
        if self.step_ms:
            step = (
                f"{format_ms(self.step_ms)} in the median, {predicted} "
                f"(measured {format_change(self.step_ms, self.predicted_step_ms)})"
            )
        received, sent = format_bytes(self.received_bytes), format_bytes(self.sent_bytes)
        between = [("between ranks", f"{received} of weights received, {sent} of gradients sent")]
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
            ("chunk uploads", f"{self.fetches:,}, {format_bytes(self.uploaded_bytes)} from host memory"),
            *(between if self.sent_bytes else ()),
            *(self._updates() if self.host_gparams or self.predicted_host_gparams else ()),
            *([("what to do", self.advice)] if self.advice else ()),
        ]

    def _updates(self) -> list[tuple[str, str]]:
        """Rows on a host that has updates to make."""
        redone = f", {self.redone_updates:,} of them done again" if self.redone_updates else ""
        rate = f"{self.host_gparams:.2f} G param/s, predicted {self.predicted_host_gparams:.2f}"
        if self.predicted_host_gparams:
            rate += f" (measured {format_change(self.host_gparams, self.predicted_host_gparams)})"
        return [
            ("speculative updates", f"{self.speculative_updates:,}{redone}"),
            ("streamed updates", f"{self.streamed_updates:,}"),
            ("AdamW on the host", rate if self.host_gparams else "none yet"),
        ]

    @property
    def advice(self) -> str:
        """What to do about steps that take over 20% more or less time than predicted; "" while there is no need."""
        change = self.step_ms / self.predicted_step_ms - 1 if self.predicted_step_ms else 0.0
        if self.steps < _SETTLED_STEPS or abs(change) <= _FAR_OFF:
            return ""
        if change < 0:
            return "run `protrain calibrate` and wrap again, as a plan for this machine's true rates may be faster"
        if self.redone_updates > self.speculative_updates / 2:
            return (
                "most steps are clipped, so early updates are made twice, which the prediction leaves out: a plan for "
                "more device memory has fewer of them"
            )
        if self.host_gparams < _SLOW_HOST * self.predicted_host_gparams:
            return (
                "the host is slower than its calibration says: end what else loads it or its memory, or run `protrain "
                "calibrate` while it is as busy as now and wrap again"
            )
        return (
            "the host is as fast as its calibration says, so look for what else takes time: a slow data loader, a busy "
            "GPU or link, calls that wait for the GPU; if there is none, run `protrain calibrate` and wrap again"
        )

    def __str__(self) -> str:
        return self.table()


class StepClock:
    """Measures the wall-clock time between steps."""

    def __init__(self) -> None:
        self.steps = 0  # steps that changed weights
        self._last = 0.0  # of no step yet
        self.durations_ms: deque[float] = deque(maxlen=_TIMED_STEPS)

    def tick(self, *, updated: bool) -> None:
        """A step was called. ``updated`` is False if its gradients overflowed, so that it changed no weights."""
        self.steps += updated
        now = time.perf_counter()
        if self._last:
            self.durations_ms.append((now - self._last) * 1e3)
        self._last = now


def make_report(engine: Engine, clock: StepClock, *, predicted_host_gparams: float) -> Report:
    """The report of ``engine``."""
    host, streamer = engine.updates.host, engine.updates.streamer
    ledger, device = engine.ledger, engine.memory.device
    peak = ledger.peak_bytes if isinstance(ledger, SimulatedLedger) else torch.cuda.max_memory_allocated(device)
    return Report(
        plan=str(engine.plan),
        steps=clock.steps,
        step_ms=statistics.median(clock.durations_ms) if clock.durations_ms else 0.0,
        predicted_step_ms=engine.plan.step_ms,
        device_bytes=peak,
        predicted_device_bytes=engine.plan.device_bytes,
        host_bytes=engine.memory.arena.total_bytes,
        predicted_host_bytes=engine.plan.host_bytes,
        fetches=engine.buffers.fetches,
        uploaded_bytes=engine.buffers.uploaded_bytes,
        received_bytes=engine.memory.ranks.received_bytes,
        sent_bytes=engine.memory.ranks.sent_bytes,
        speculative_updates=host.counts[UpdateState.COMMITTED] + host.counts[UpdateState.REDONE],
        redone_updates=host.counts[UpdateState.REDONE],
        streamed_updates=0 if streamer is None else streamer.updates,
        host_gparams=host.rate.mean_gparams(),
        predicted_host_gparams=predicted_host_gparams,
    )
