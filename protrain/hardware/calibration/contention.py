"""What runs together in a step, and how much each activity slows the others.

Every activity has a thread that repeats units of some milliseconds. All threads start together and run until the end of
the measurement. What an activity completes in that time is its rate. Its share is that rate over its rate alone.

Collectives wait for those of the other ranks, whose measurements end at other moments. So all ranks do a number of them
that they have agreed on, which takes longer than the measurement.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from protrain.hardware.calibration.ranks import Collectives
from protrain.hardware.calibration.rates import AdamChunk, Products, StreamedChunk, Transfers, pinned
from protrain.hardware.calibration.timing import Effort
from protrain.hardware.profile import Contention
from protrain_kernels import PADDING

_PRODUCTS_IN_UNIT = 4
_REGIONS = 4  # 1 GiB each way, because a host may have a cache of 300 MiB
_LEAST_UNITS = 4
_SLICES = 8  # the median rate of so many slices of a run counts, since a stall of the machine falls into one slice

# What a step runs at the same time. Each group is measured together, and every activity alone.
_GROUPS = (
    ("h2d", "d2h"),
    ("h2d", "host_adam"),
    ("h2d", "matmul"),
    ("d2h", "host_adam"),
    ("d2h", "matmul"),
    ("host_adam", "matmul"),
    ("h2d", "d2h", "host_adam"),
    ("h2d", "d2h", "matmul"),
    ("h2d", "d2h", "host_adam", "matmul"),
)
_STREAMED_GROUPS = (
    ("streamed_adam", "host_adam"),
    ("streamed_adam", "matmul"),
    ("streamed_adam", "host_adam", "matmul"),
)
_COLLECTIVE_GROUPS = (("collective", "matmul"),)  # all that the planner reads of collectives


def groups_on(device: torch.device, n_ranks: int = 1) -> list[tuple[str, ...]]:
    """The groups that each of ``n_ranks`` measures: every activity alone, then those that run together."""
    groups = (*_GROUPS, *_STREAMED_GROUPS) if device.type == "cuda" else _GROUPS
    groups = (*groups, *_COLLECTIVE_GROUPS) if n_ranks > 1 else groups
    names = dict.fromkeys(name for group in groups for name in group)
    return [*((name,) for name in names), *groups]


# Does one unit of an activity's work, and returns when that unit or the one before is done.
Unit = Callable[[], object]


class OnStream:
    """Units of work on a stream of their own. Two are in flight, so that the device never waits for the host."""

    def __init__(self, queue: Unit, device: torch.device) -> None:
        self._queue = queue
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # The events block, because a thread that spins would take a core from the host's AdamW.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._units = 0

    def __call__(self) -> None:
        """Queue a unit and wait for the one before."""
        torch.cuda.set_device(self._device)  # see [Note: the current GPU] in engine/updates/worker.py
        with torch.cuda.stream(self._stream):
            self._queue()
            self._events[self._units % 2].record()
        self._units += 1
        self._events[self._units % 2].synchronize()  # returns at once for an event that was never recorded


def units_per_second(
    activities: Mapping[str, Unit], *, duration_s: float, counts: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Units a second of every activity, by name, while all of them run for ``duration_s``.

    An activity that is among ``counts`` does this number of units, however long they take. An exception in one activity
    ends all of them and is raised here.
    """
    barrier = threading.Barrier(len(activities) + 1)
    stop = threading.Event()
    failures: list[BaseException] = []
    stamps: dict[str, list[float]] = {name: [] for name in activities}

    def work(unit: Unit, done: list[float], count: int | None) -> None:
        try:
            unit()  # warms up caches and compiles
            unit()
            barrier.wait()
            while not stop.is_set() if count is None else len(done) < count:
                unit()
                done.append(time.perf_counter())
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            failures.append(error)
            stop.set()
            barrier.abort()

    threads = [
        threading.Thread(target=work, args=(unit, stamps[name], (counts or {}).get(name)), daemon=True)
        for name, unit in activities.items()
    ]
    try:
        for thread in threads:
            thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()
        begin = time.perf_counter()
        while not stop.wait(duration_s / _SLICES):
            if time.perf_counter() - begin >= duration_s and min(map(len, stamps.values())) >= _LEAST_UNITS:
                stop.set()
        end = time.perf_counter()
    finally:  # after an interrupt too: the memory that they copy is unpinned next, and a copy would fail on it
        stop.set()
        barrier.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
    # A unit that ends after the measurement may have run while other activities had stopped.
    return {name: _rate([begin, *(stamp for stamp in done if stamp <= end)]) for name, done in stamps.items()}


def _rate(stamps: Sequence[float]) -> float:
    """Units a second: the median over slices with equally many units."""
    units = len(stamps) - 1
    step = max(1, units // _SLICES)
    rates = [step / (stamps[first + step] - stamps[first]) for first in range(0, units - step + 1, step)]
    return statistics.median(rates)


class Together:
    """The activities of one machine and the memory that they work on, made once and used for every group."""

    def __init__(
        self,
        device: torch.device,
        effort: Effort,
        products: Products,
        chunks: Sequence[AdamChunk],
        *,
        threads: int,
        collectives: Collectives | None = None,
    ) -> None:
        self._device = device
        self._collectives = collectives
        portions = portions_of(chunks)
        turns = itertools.cycle(portions)

        def update_portion() -> None:
            for part in next(turns):
                part.update(threads)

        self._copies = Transfers(device, max(effort.transfer_bytes), regions=_REGIONS)
        self._streamed = StreamedChunk(device, effort.adam_elements) if device.type == "cuda" else None
        self._found: dict[tuple[str, ...], list[dict[str, float]]] = {}  # rates, by group
        self._activities: dict[str, Unit] = {
            "h2d": self._on_device(self._copies.up),
            "d2h": self._on_device(self._copies.down),
            "host_adam": update_portion,
            "matmul": self._on_device(lambda: products.run(_PRODUCTS_IN_UNIT)),
        }
        if self._streamed is not None:
            self._activities["streamed_adam"] = self._on_device(self._streamed.update)
        if collectives is not None:
            self._activities["collective"] = self._on_device(collectives.both)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams work on memory that this stream has filled

    def _on_device(self, queue: Unit) -> Unit:
        return OnStream(queue, self._device) if self._device.type == "cuda" else queue

    @contextlib.contextmanager
    def ready(self) -> Iterator[bool]:
        """Pin the host memory of copies inside the context. Yields whether that was possible."""
        streamed = () if self._streamed is None else self._streamed.chunk
        with pinned(*self._copies.host, *streamed, device=self._device) as accepted:
            try:
                yield accepted
            finally:
                self._activities.clear()  # they refer to all of the memory, and to this object

    def measure(self, group: Collection[str], *, duration_s: float) -> None:
        """Run ``group`` together. It may be measured several times."""
        counts = {}
        if "collective" in group:
            assert self._collectives is not None, "there are several ranks"
            counts["collective"] = max(_LEAST_UNITS, self._collectives.units_in(duration_s))
        activities = {name: self._activities[name] for name in group}
        found = units_per_second(activities, duration_s=duration_s, counts=counts)
        self._found.setdefault(tuple(group), []).append(found)

    def contention(self) -> list[Contention]:
        """The shares in every group that was measured."""
        return best_shares(self._found)


def portions_of(chunks: Sequence[AdamChunk]) -> list[list[AdamChunk]]:
    """As many portions as ``chunks``, each with a part of every chunk.

    The portions are alike, even where some chunks are slower than others.
    """
    count = len(chunks)
    elements = chunks[0].elements // count // PADDING * PADDING
    return [[chunk.part(index * elements, elements) for chunk in chunks] for index in range(count)]


def best_shares(found: Mapping[tuple[str, ...], Sequence[Mapping[str, float]]]) -> list[Contention]:
    """The shares in every group of several activities, from the rates in all runs of every group.

    The best run of a group counts, and the best rate of an activity alone. Whatever else a machine does for some
    seconds only makes it slower. If that slowed an activity alone, its share beside others would seem larger.
    """
    alone = {group[0]: max(run[group[0]] for run in runs) for group, runs in found.items() if len(group) == 1}
    shares = {
        group: max((tuple(run[name] / alone[name] for name in group) for run in runs), key=sum)
        for group, runs in found.items()
        if len(group) > 1
    }
    return [Contention(activities=group, shares=each) for group, each in shares.items()]
