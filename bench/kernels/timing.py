"""Clocks of the suite: device events behind a cold L2 cache, and the host's clock for host kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from bench.clock import device_timer, durations_ms

_FLUSHED_BYTES = 512 * 1024**2  # ten times the L2 cache of an H100, and twice the largest of the cards here
_MOST_FLUSHES = 100  # some 20 ms
_FLUSHES_TIMED = 22


def host_timer() -> float:
    """Now on the host, once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class ColdCache:
    """Empties the L2 cache by reading something else: reading leaves no dirty lines that the next kernel pays for.

    The device reads for as long as the host needs to launch what is timed next, so that launches don't count.
    """

    def __init__(self, device: torch.device) -> None:
        self._other = torch.zeros(_FLUSHED_BYTES // 4, dtype=torch.int32, device=device)
        self._sum = torch.zeros((), dtype=torch.int32, device=device)
        self._times = 1
        moments = [device_timer()]
        for _ in range(_FLUSHES_TIMED):
            self()
            moments.append(device_timer())
        self._seconds = median(durations_ms(moments)[2:]) / 1e3  # two warm up

    def cover(self, host_s: float) -> None:
        """From now on keep the device busy for ``host_s``, up to a limit."""
        self._times = min(max(math.ceil(host_s / self._seconds), 1), _MOST_FLUSHES)

    def __call__(self) -> None:
        for _ in range(self._times):
            torch.amax(self._other, dim=0, out=self._sum)


def best_threads(run: Callable[[], object]) -> int:
    """The thread count of torch with which ``run``, on the host, is fastest: all of them, one fewer, or half."""
    whole = torch.get_num_threads()
    taken_s = {}
    try:
        for count in sorted({max(1, whole // 2), max(1, whole - 1), whole}):
            torch.set_num_threads(count)
            run()
            taken_s[count] = min(_host_seconds(run) for _ in range(2))
    finally:
        torch.set_num_threads(whole)
    return min(taken_s, key=lambda count: taken_s[count])


def _host_seconds(run: Callable[[], object]) -> float:
    start = host_timer()
    run()
    return host_timer() - start
