"""The rates of activities, alone and beside others.

Every activity has a thread that repeats units of some milliseconds. All threads start together and run until the end of
the measurement. What an activity completes in that time is its rate. Its share beside others is that rate over the
best rate that it had anywhere.

Collectives wait for those of the other ranks, whose measurements end at other moments. So all ranks do a number of them
that they have agreed on, which takes longer than the measurement. In a step all ranks wait for the slowest, so the
least of each rate and of each share over the ranks counts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import harmonic_mean, median

from protrain.distributed.ranks import Ranks
from protrain.hardware.calibration.activities import Activity
from protrain.hardware.profile import Contention

_LEAST_UNITS = 4
_SLICES = 8  # a measurement has so many slices, since a stall of the machine falls into one of them
_COLLECTIVES = "gather", "exchange", "collective"
_MARGIN = 1.5  # so much longer than a measurement collectives go on, as others should not run alone at its end

# The rate of an activity alone, by the name of the profile's field.
_RATES = {
    "matmul": "matmul_tflops",
    "device_copy": "device_copy_gbps",
    "h2d": "h2d_gbps",
    "d2h": "d2h_gbps",
    "dram": "host_dram_gbps",
    "host_adam": "host_adam_gparams",
    "host_adam_weight": "host_adam_weight_gparams",
    "host_adam_narrow": "host_adam_narrow_gparams",
    "device_adam": "device_adam_gparams",
    "streamed_adam": "streamed_adam_gparams",
    "gather": "all_gather_gbps",
    "exchange": "all_to_all_gbps",
}
# What a step runs at the same time, in the pairs that the planner reads.
_GROUPS = (
    ("h2d", "d2h"),
    ("h2d", "host_adam"),
    ("h2d", "matmul"),
    ("d2h", "host_adam"),
    ("d2h", "matmul"),
    ("host_adam", "matmul"),
    ("streamed_adam", "host_adam"),
    ("streamed_adam", "matmul"),
    ("collective", "matmul"),
)

Group = tuple[str, ...]
Runs = Mapping[Group, Sequence[Mapping[str, Sequence[float]]]]  # what ``rates_together`` found, by group, in rounds


def groups_of(names: Sequence[str]) -> list[Group]:
    """The groups that are measured of activities with ``names``: each alone, then those that run together."""
    return [*((name,) for name in names), *(group for group in _GROUPS if set(group) <= set(names))]


def rates_on_ranks(
    ranks: Ranks, activities: Mapping[str, Activity], what: str, *, duration_s: float
) -> dict[str, list[float]]:
    """``rates_together`` on all ranks, which start at the same time and do equally many collectives.

    ``what`` says in the errors of other ranks what is measured.
    """
    own_s = {name: _unit_s(activity) for name, activity in activities.items() if name in _COLLECTIVES}
    of_ranks = ranks.all_values(own_s, what)
    counts = {
        name: max(_LEAST_UNITS, math.ceil(_MARGIN * duration_s / max(each[name] for each in of_ranks)))
        for name in own_s
    }
    return rates_together(activities, duration_s=duration_s, counts=counts)


def _unit_s(activity: Activity) -> float:
    """Seconds of one unit, when several follow each other. The first of them may load a kernel."""
    activity.unit()
    activity.unit()
    begin = time.perf_counter()
    for _ in range(_LEAST_UNITS):
        activity.unit()
    return (time.perf_counter() - begin) / _LEAST_UNITS


def rates_together(
    activities: Mapping[str, Activity], *, duration_s: float, counts: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """What each activity does a second, by name, while all of them run for ``duration_s``: a rate for each slice of it.

    An activity that is among ``counts`` does this number of units, however long they take. An exception in one activity
    ends all of them and is raised here.
    """
    barrier = threading.Barrier(len(activities) + 1)
    stop = threading.Event()
    stamps: dict[str, list[float]] = {name: [] for name in activities}  # when it starts, and when each unit ends

    def work(activity: Activity, done: list[float], count: int | None) -> None:
        try:
            activity.unit()  # warms up caches and compiles
            activity.unit()
            barrier.wait()
            done.append(time.perf_counter())
            while not stop.is_set() if count is None else len(done) <= count:
                activity.unit()
                done.append(time.perf_counter())
        except threading.BrokenBarrierError:
            return
        except BaseException:
            stop.set()
            barrier.abort()
            raise

    # The pool waits for its threads after an interrupt too: the memory that they copy is unpinned next.
    with ThreadPoolExecutor(len(activities)) as pool:
        try:
            running = [
                pool.submit(work, activity, stamps[name], (counts or {}).get(name))
                for name, activity in activities.items()
            ]
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait()
            begin = time.perf_counter()
            while not stop.wait(duration_s / _SLICES):
                if time.perf_counter() - begin >= duration_s and min(map(len, stamps.values())) > _LEAST_UNITS:
                    stop.set()
            end = time.perf_counter()
        finally:
            stop.set()
            barrier.abort()
    for each in running:
        each.result()  # raises what the activity raised
    # A unit that ends after the measurement may have run while other activities had stopped.
    return {
        name: _rates(activity.amount, [stamp for stamp in stamps[name] if stamp <= end])
        for name, activity in activities.items()
    }


def _rates(amount: float, stamps: Sequence[float]) -> list[float]:
    """The rates of units of ``amount``, which start or end at ``stamps``, over slices with equally many units."""
    units = len(stamps) - 1
    step = max(1, units // _SLICES)
    return [step * amount / (stamps[first + step] - stamps[first]) for first in range(0, units - step + 1, step)]


def rates_alone(runs: Runs) -> dict[str, float]:
    """The rates of activities alone, by field. Of several rounds the best counts, as other work only slows down."""
    return {field: max(median(run[name]) for run in runs[name,]) for name, field in _RATES.items() if (name,) in runs}


def rates_of(runs: Runs) -> dict[str, float]:
    """The rates of a profile, by field.

    The rates of the host's AdamW are all work over all time. In a step the host updates dozens of chunks, and the step
    takes as long as all of them together. Where a third of them take half as long again, as on a host with neighbours,
    the median does not show it.
    """
    rates = rates_alone(runs)
    rates["bidirectional_gbps"] = max(sum(map(median, run.values())) for run in runs["h2d", "d2h"])
    for name in ("host_adam", "host_adam_weight", "host_adam_narrow"):
        rates[_RATES[name]] = harmonic_mean(rate for run in runs[name,] for rate in run[name])
    return rates


def shares_of(runs: Runs) -> list[Contention]:
    """The shares in every group of several activities: those of its best round, of the best rate of each activity.

    An activity may have its best rate beside others, if something else on the machine slowed it down while it ran
    alone. Shares of the rate alone would then be too large.
    """
    best: dict[str, float] = {}
    for run in itertools.chain.from_iterable(runs.values()):
        for name, rates in run.items():
            best[name] = max(best.get(name, 0.0), median(rates))
    shares = {
        group: max((tuple(median(run[name]) / best[name] for name in group) for run in found), key=sum)
        for group, found in runs.items()
        if len(group) > 1
    }
    return [Contention(activities=group, shares=each) for group, each in shares.items()]


def slowest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The least of every rate over the ranks, which have measured the same rates."""
    return {name: min(rates[name] for rates in of_ranks) for name in of_ranks[0]}


def most_contended(of_ranks: Sequence[Sequence[Contention]]) -> list[Contention]:
    """The least of every share over the ranks, which have measured the same groups."""
    return [
        replace(each[0], shares=tuple(map(min, zip(*(group.shares for group in each), strict=True))))
        for each in zip(*of_ranks, strict=True)
    ]
