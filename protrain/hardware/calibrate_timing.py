"""How calibration times: many short runs, of which a fast one counts, and several activities at once by throughput."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_SHARE = 0.2  # of the runs are faster than the one that counts: a ceiling, without the luck of the very best
_MOST_RUNS = 200


def seconds(run: Callable[[], object], device: torch.device, *, budget_s: float = 0.2, least: int = 5) -> float:
    """Seconds of one ``run`` on ``device``: the 20th percentile of as many runs as ``budget_s`` holds, one warming up.

    The clock of a GPU is its events, so that ``run`` may only queue its work.
    """
    run()
    _finish(device)
    begin = time.perf_counter()
    durations: list[float] = []
    while len(durations) < least or (time.perf_counter() - begin < budget_s and len(durations) < _MOST_RUNS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            durations.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            durations.append(time.perf_counter() - started)
    return sorted(durations)[int(_SHARE * len(durations))]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Work that goes on in a training step, in units of some milliseconds."""

    name: str
    run: Callable[[], object]  # does one unit; returns once it is done, and lets other threads run meanwhile


class DeviceActivity:
    """Units queued on a stream of their own, two in flight so that the device never waits for the host."""

    def __init__(self, queue: Callable[[], object], device: torch.device) -> None:
        self._queue = queue
        self._stream = torch.cuda.Stream(device)
        self._events = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._units = 0

    def __call__(self) -> None:
        """Queue a unit and wait for the one before."""
        with torch.cuda.stream(self._stream):
            self._queue()
            self._events[self._units % 2].record()
        self._units += 1
        self._events[self._units % 2].synchronize()  # at once when it was never recorded


def units_per_second(activities: Sequence[Activity], *, duration_s: float) -> dict[str, float]:
    """Units a second of every activity while all of them run, each from a thread of its own.

    An exception in one of them ends all and is raised here.
    """
    ready = threading.Barrier(len(activities))
    failures: list[BaseException] = []
    rates: dict[str, float] = {}
    deadline: list[float] = []

    def work(activity: Activity) -> None:
        try:
            activity.run()  # warm up: caches, compilation, first touch
            if ready.wait() == 0:
                deadline.append(time.perf_counter() + duration_s)
            ready.wait()
            begin = time.perf_counter()
            units, now = 0, begin
            # The last unit counts in full and so does its time, so that long units are not cut off.
            while now < deadline[0] and not failures:
                activity.run()
                units += 1
                now = time.perf_counter()
            rates[activity.name] = units / (now - begin)
            while not failures and len(rates) < len(activities):
                activity.run()  # keeps the pressure up until the slowest has counted its last unit
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(activity,), daemon=True) for activity in activities]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return rates
