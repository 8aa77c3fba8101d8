"""The parts of a traced step and their times: its states, calls and segments, and the steps that are timed.

Steps are timed as they run in training, where one step follows another. A GPU that was idle is faster at first than in
training, until it has computed for about 0.6 s. An H200 was 4% faster in a forward of 60 ms, and 1% to 2% faster in the
backward after it (7 B width, 8 layers, 4 x 2048). The forward of a step of two seconds (7 B, 8 x 2048) was 5.1% too
short with no computing before it. So the first step on a GPU never counts, whether it is long or short.

Ranks that profile together run equally many steps, because a model may have collectives of its own in its forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median_low
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
    compiled: bool,
    sustained_ms: float,
    together: Together = ALONE,
) -> list[Durations]:
    """The durations of the steps that count. ``step`` queues one step.

    A GPU must compute for ``sustained_ms`` before times are those of training. Steps that take less are queued
    together, and all but the first count. A longer one counts if another one ran before it. With ``sustained_ms`` 0, as
    on a CPU, a single step counts. A step in which something was compiled never counts.
    """

    def alone() -> Durations:
        segments = step()
        finish(device)
        return durations(segments)

    known = graphs_compiled() if compiled else 0
    only = alone()
    if together.largest(COMPILED, compiled and graphs_compiled() != known):
        only = alone()
    lasted_ms = together.largest(LASTED, sum(whole for whole, _ in only))  # on a CPU too, as a rank may have left
    if not sustained_ms:
        return [only]
    if lasted_ms >= sustained_ms:
        return [alone()]
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
