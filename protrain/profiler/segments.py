"""What a traced step consists of: its states, calls and segments, and the time stamps at their boundaries."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


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
