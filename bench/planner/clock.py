"""Moments of a run by the device's own clock, and the times between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


def now(device: torch.device) -> Any:
    """A mark after everything that ``device`` has been given to do so far."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def durations_ms(moments: Sequence[Any], device: torch.device) -> tuple[float, ...]:
    """The times from each of ``moments`` to the next. Waits for the last moment."""
    if device.type == "cpu":
        return tuple((second - first) * 1e3 for first, second in pairwise(moments))
    torch.cuda.synchronize(device)
    return tuple(first.elapsed_time(second) for first, second in pairwise(moments))
