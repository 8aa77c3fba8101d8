"""Clocks of the suite: device events behind a cold L2 cache, and the host's clock for host kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_FLUSHED_BYTES = 512 * 1024**2  # ten times the largest L2 cache


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


def host_timer() -> float:
    """Now on the host, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class ColdCache:
    """Empties the L2 cache by reading something else: reading leaves no dirty lines that the next kernel pays for."""

    def __init__(self, device: torch.device) -> None:
        self._other = torch.zeros(_FLUSHED_BYTES // 4, dtype=torch.int32, device=device)
        self._sum = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        torch.amax(self._other, dim=0, out=self._sum)


def median_seconds(run: Callable[[], object], *, setup: Callable[[], object] | None, rounds: int = 20) -> float:
    """The median of ``rounds`` timed runs on the device, after two that warm up."""
    durations = []
    for round_ in range(rounds + 2):
        if setup is not None:
            setup()
        start = device_timer()
        run()
        seconds = device_timer() - start
        if round_ >= 2:
            durations.append(seconds)
    return float(sorted(durations)[rounds // 2])
