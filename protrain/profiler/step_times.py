"""The parts of a traced step and their times: its states, calls and segments, and the steps that are timed.

Steps are timed as they run in training, where one step follows another. A GPU that was idle is faster at first than in
training, until it has computed for about 0.6 s. An H200 was 4% faster in a forward of 60 ms, and 1% to 2% faster in the
backward after it (7 B width, 8 layers, 4 x 2048). A step of two seconds (7 B, 8 x 2048) is timed best after a quarter
of a second of other computing. Its forward, which comes first, was 5.1% too short with none before, 2.5% too short
after 0.7 s, and right within 0.4% after 0.25 s.

Ranks that profile together run equally many steps, because a model may have collectives of its own in its forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median, median_low
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from protrain.forward.compilation import graphs_compiled


class StepState(Enum):
    """What the step is doing."""

    FORWARD = auto()
    MEASURING = auto()  # within forward: a block runs apart, to be measured
    BACKWARD = auto()
    RECOMPUTING = auto()  # within backward: a block runs again


@dataclass(eq=False)
class Call:
    """One call of a block, or of a unit between blocks."""

    unit: str
    reached: bool = False  # whether backward has reached it


@dataclass
class Segment:
    """A part of the step. Times are time stamps until the step is over."""

    phase: str  # "forward" or "backward"
    block: str | None
    live_bytes: int = 0
    peak_bytes: int = 0
    start: Any = None
    recomputed: Any = None  # end of the recomputation in a block's backward segment
    end: Any = None
    # In a block's forward: the inputs that code outside the checkpoint holds for longer, each with the index of the
    # first segment in which it no longer does.
    held_until: dict[StorageWeakRef, int] = field(default_factory=dict)


def time_stamp(device: torch.device) -> Any:
    """The present moment on ``device``: a CUDA event, or milliseconds of the host's clock."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter() * 1e3


def elapsed_ms(start: Any, end: Any) -> float:
    """The milliseconds between two time stamps, or 0 if one is missing. The device must have finished."""
    if start is None or end is None:
        return 0.0
    return float(start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else end - start)


def finish(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


SUSTAINED_MS = 1000.0  # how long the GPU must compute before times are those of training
_BUSY_MS = 250.0
_BUSY_SIZE = 8192
_MOST_STEPS = 3  # the number of steps that count

# What ranks decide together, in this order. Each takes the largest number of all.
MISSING = "the question whether a profile is missing"
COMPILED = "the question whether a step was compiled"
LASTED = "the time of a step"


class Together:
    """The ranks that profile together: this one, which profiles by itself. Several ranks have a class of their own."""

    def largest(self, what: str, number: float) -> float:
        """The largest ``number`` that any rank has for ``what`` is decided."""
        return number

    def caught(self, error: Exception) -> None:
        """``error`` has ended a step of this rank, which profiles otherwise now."""


ALONE = Together()


Durations = list[tuple[float, float]]  # for each segment, its duration and the part of it that is recomputation, in ms


def time_steps(
    step: Callable[[], list[Segment]],
    device: torch.device,
    *,
    expected_ms: float,
    compiled: bool,
    sustained_ms: float,
    together: Together = ALONE,
) -> list[Durations]:
    """The durations of the steps that count: of one step, or of a few if one takes less than ``sustained_ms``.

    ``step`` queues one step. If it is expected to take that long, the GPU computes something else first, and the step
    counts. Otherwise a few steps are queued together, and all but the first count. A step in which something was
    compiled never counts.
    """

    def alone() -> Durations:
        if device.type == "cuda" and expected_ms >= sustained_ms:
            _keep_busy(device)
        segments = step()
        finish(device)
        return durations(segments)

    known = graphs_compiled() if compiled else 0
    only = alone()
    if together.largest(COMPILED, compiled and graphs_compiled() != known):
        only = alone()
    lasted_ms = together.largest(LASTED, sum(whole for whole, _ in only))
    if lasted_ms >= sustained_ms:
        return [only]
    n_steps = min(_MOST_STEPS, math.ceil((sustained_ms - lasted_ms) / lasted_ms)) if lasted_ms > 0 else _MOST_STEPS
    queued = [step() for _ in range(1 + n_steps)]
    finish(device)
    return [durations(segments) for segments in queued[1:]]


def durations(segments: list[Segment]) -> Durations:
    """The durations of the segments of a finished step."""
    return [
        (elapsed_ms(segment.start, segment.end), elapsed_ms(segment.start, segment.recomputed)) for segment in segments
    ]


def median_durations(steps: list[Durations]) -> Durations:
    """For each segment the median over ``steps``, and of two steps the lower: an interruption seldom delays both."""
    return [
        (median_low(whole for whole, _ in segment), median_low(recomputation for _, recomputation in segment))
        for segment in zip(*steps, strict=True)
    ]


def expected_ms(segments: list[Segment]) -> float:
    """Estimate the time of a step from the first step's ``segments``, whose blocks may include time for compiling."""
    total_ms = 0.0
    for phase in ("forward", "backward"):
        taken = [
            (segment.block, whole)
            for segment, (whole, _) in zip(segments, durations(segments), strict=True)
            if segment.phase == phase
        ]
        in_blocks = [whole for block, whole in taken if block is not None]
        total_ms += sum(whole for block, whole in taken if block is None)
        total_ms += len(in_blocks) * median(in_blocks or [0.0])
    return total_ms


def _keep_busy(device: torch.device) -> None:
    """Queue matrix products that take about ``_BUSY_MS``, or nothing if there is no memory for them."""
    generator = torch.Generator(device).manual_seed(0)
    size = (_BUSY_SIZE, _BUSY_SIZE)
    try:  # random values, because zeros draw less power
        factor = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        product = torch.empty_like(factor)
    except torch.OutOfMemoryError:  # profiling goes on without it
        return
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.mm(factor, factor, out=product)  # the first product loads the library's kernel
    start.record()
    torch.mm(factor, factor, out=product)
    end.record()
    end.synchronize()
    for _ in range(round(_BUSY_MS / start.elapsed_time(end))):
        torch.mm(factor, factor, out=product)
