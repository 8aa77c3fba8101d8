"""Moments that a benchmark takes without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


class DeviceInstant:
    """A point on the current stream; the difference of two is seconds, as pytest-benchmark wants it.

    The first of a pair must not wait for the device: work queued before it hides the launch of what is timed.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: DeviceInstant) -> float:
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def device_timer() -> Any:
    """Now on the device, or on the host where there is no device."""
    return DeviceInstant() if torch.cuda.is_available() else time.perf_counter()


def durations_ms(moments: Sequence[Any]) -> tuple[float, ...]:
    """The milliseconds from each of ``moments`` of ``device_timer`` to the next. Waits for the last of them."""
    return tuple((later - earlier) * 1e3 for earlier, later in pairwise(moments))
