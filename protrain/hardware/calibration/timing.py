"""How calibration times: many batches of runs, of which the median counts and the spread is told.

Work on a GPU is timed by its events and in batches of a few milliseconds, so that launching is hidden as it is in a
step; work on the host by its clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from protrain.hardware.profile import Figure

_BATCH_S = 2e-3  # of one timed batch: far above the resolution of events, and what hides launches
_MOST_IN_BATCH = 256
_MOST_BATCHES = 500
_LEAST_BATCHES = 5


@dataclass(frozen=True)
class Spread:
    """Median, and the values that a fifth of the samples are below and above."""

    median: float
    p20: float
    p80: float


def spread_of(samples: Sequence[float]) -> Spread:
    """The spread of at least one sample."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Spread(middle, ordered[math.floor(0.2 * last)], ordered[math.ceil(0.8 * last)])


def durations_s(run: Callable[[], object], device: torch.device, *, budget_s: float) -> list[float]:
    """Seconds of one ``run`` on ``device``, one sample a batch, as many as ``budget_s`` holds but at least five.

    Args:
        run: does the work, or queues it on the current stream of a GPU.
        device: whose clock counts.
        budget_s: of all samples; the warm-up comes on top.
    """
    run()  # compiles and allocates
    once_s = batch_s(run, device, 1)
    runs = max(1, min(_MOST_IN_BATCH, math.ceil(_BATCH_S / max(once_s, 1e-7))))
    begin = time.perf_counter()
    samples: list[float] = []
    while len(samples) < _LEAST_BATCHES or (time.perf_counter() - begin < budget_s and len(samples) < _MOST_BATCHES):
        samples.append(batch_s(run, device, runs))
    return samples


def batch_s(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Seconds of one of ``runs`` runs in a row on ``device``, by its clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / runs
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - begin) / runs


def figure_of(
    name: str, durations: Sequence[float], work: float, unit: str, *, at: str = "", datasheet: float | None = None
) -> Figure:
    """The rate at which ``work``, in ``unit`` times seconds, was done.

    Args:
        name: what was measured.
        durations: seconds of each sample.
        work: done in one of them.
        unit: of the rate: "GB/s", "TFLOP/s", "G param/s".
        at: the size, the threads or the way, where there are several.
        datasheet: what the maker promises, in ``unit``.
    """
    rates = spread_of([work / max(seconds, 1e-12) for seconds in durations])
    mean = work * len(durations) / max(sum(durations), 1e-12)
    return Figure(
        name=name, at=at, unit=unit, median=rates.median, p20=rates.p20, p80=rates.p80, datasheet=datasheet, mean=mean
    )
