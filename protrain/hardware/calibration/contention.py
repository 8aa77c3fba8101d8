"""What runs together in a step, and how much each slows the others.

Every activity has a thread that repeats units of some milliseconds. All start together, and what each completes until
the last bell, none of them having stopped, gives its rate; against its rate alone that is its share.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from protrain.hardware.calibration.device_rates import Products
from protrain.hardware.calibration.effort import Effort
from protrain.hardware.calibration.optimizers import AdamChunk, StreamedChunk
from protrain.hardware.calibration.timing import spread_of
from protrain.hardware.calibration.transfers import Transfers
from protrain.hardware.profile import Contention
from protrain_kernels import PADDING

_PRODUCTS_IN_UNIT = 4
_REGIONS = 4  # 1 GiB each way: a host may have a cache of 300 MiB
_LEAST_UNITS = 4
_SLICES = 8  # of a run, whose median rate counts: a stall of the machine falls into one of them

# What a step runs at once. Each is measured together, and every name alone.
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


def groups_on(device: torch.device) -> list[tuple[str, ...]]:
    """What there is to measure on ``device``: every activity alone, then what runs together."""
    groups = (*_GROUPS, *_STREAMED_GROUPS) if device.type == "cuda" else _GROUPS
    names = dict.fromkeys(name for group in groups for name in group)
    return [*((name,) for name in names), *groups]


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Work of a step, in units of some milliseconds."""

    name: str
    run: Callable[[], object]  # does one unit and returns when it, or the one before it, is done


class OnStream:
    """Units queued on a stream of their own, two in flight so that the device never waits for the host."""

    def __init__(self, queue: Callable[[], object], device: torch.device) -> None:
        self._queue = queue
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Blocking: a thread that spins would take a core from the host's AdamW.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._units = 0

    def __call__(self) -> None:
        """Queue a unit and wait for the one before."""
        self._stream.query()  # gives a new thread the device's context, without which cuBLAS warns
        with torch.cuda.stream(self._stream):
            self._queue()
            self._events[self._units % 2].record()
        self._units += 1
        self._events[self._units % 2].synchronize()  # at once when it was never recorded


def units_per_second(activities: Sequence[Activity], *, duration_s: float) -> dict[str, float]:
    """Units a second of every activity while all of them run.

    An exception in one of them ends all and is raised here.
    """
    barrier = threading.Barrier(len(activities) + 1)
    stop = threading.Event()
    failures: list[BaseException] = []
    stamps: dict[str, list[float]] = {activity.name: [] for activity in activities}

    def work(activity: Activity) -> None:
        try:
            activity.run()  # warm up: caches, compilation
            activity.run()
            barrier.wait()
            done = stamps[activity.name]
            while not stop.is_set():
                activity.run()
                done.append(time.perf_counter())
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            failures.append(error)
            stop.set()
            barrier.abort()

    threads = [threading.Thread(target=work, args=(activity,), daemon=True) for activity in activities]
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
    finally:  # also when interrupted: what they copy is unpinned next, and the GPU would meet an illegal address
        stop.set()
        barrier.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
    # A unit that ends after the bell may have run while others had stopped.
    return {name: _rate([begin, *(stamp for stamp in done if stamp <= end)]) for name, done in stamps.items()}


def _rate(stamps: Sequence[float]) -> float:
    """Units a second of the median of slices with equally many units."""
    units = len(stamps) - 1
    step = max(1, units // _SLICES)
    rates = [step / (stamps[first + step] - stamps[first]) for first in range(0, units - step + 1, step)]
    return spread_of(rates).median


class Together:
    """The activities of one machine, with what they work on. Made once, used for every group."""

    def __init__(
        self, device: torch.device, effort: Effort, products: Products, chunks: Sequence[AdamChunk], *, threads: int
    ) -> None:
        self._device = device
        portions = portions_of(chunks)
        turns = itertools.cycle(portions)

        def update_portion() -> None:
            for part in next(turns):
                part.update(threads)

        self._copies = Transfers(device, max(effort.transfer_bytes), regions=_REGIONS)
        self._streamed = StreamedChunk(device, effort.adam_elements) if device.type == "cuda" else None
        self._found: dict[tuple[str, ...], list[dict[str, float]]] = {}  # rates, by group
        runs: dict[str, Callable[[], object]] = {
            "h2d": self._on_device(self._copies.up),
            "d2h": self._on_device(self._copies.down),
            "host_adam": update_portion,
            "matmul": self._on_device(lambda: products.run(_PRODUCTS_IN_UNIT)),
        }
        if self._streamed is not None:
            runs["streamed_adam"] = self._on_device(self._streamed.update)
        self._activities = {name: Activity(name=name, run=run) for name, run in runs.items()}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams work on what was filled on this one

    def _on_device(self, queue: Callable[[], object]) -> Callable[[], object]:
        return OnStream(queue, self._device) if self._device.type == "cuda" else queue

    @contextlib.contextmanager
    def ready(self) -> Iterator[bool]:
        """Pin what is transferred inside the context; whether that was possible."""
        with contextlib.ExitStack() as stack:
            accepted = stack.enter_context(self._copies.ready())
            if self._streamed is not None:
                accepted = stack.enter_context(self._streamed.ready()) and accepted
            stack.callback(self._activities.clear)  # they refer to all of the memory, and to this
            yield accepted

    def _rates(self, group: Collection[str], duration_s: float) -> dict[str, float]:
        return units_per_second([self._activities[name] for name in group], duration_s=duration_s)

    def measure(self, group: Collection[str], *, duration_s: float) -> None:
        """Run ``group`` together, once more if it has been measured before."""
        self._found.setdefault(tuple(group), []).append(self._rates(group, duration_s))

    def contention(self) -> list[Contention]:
        """The shares of every group that was measured."""
        return best_shares(self._found)


def portions_of(chunks: Sequence[AdamChunk]) -> list[list[AdamChunk]]:
    """As many as there are ``chunks``, each a part of all of them: alike, though some chunks are slower than others."""
    count = len(chunks)
    elements = chunks[0].elements // count // PADDING * PADDING
    return [[chunk.part(index * elements, elements) for chunk in chunks] for index in range(count)]


def best_shares(found: Mapping[tuple[str, ...], Sequence[Mapping[str, float]]]) -> list[Contention]:
    """The shares of every group of several, each at its best, from rates by activity of every run.

    Whatever else a machine does for some seconds can only make it slower, and what slows an activity alone would make
    others seem to leave it more.
    """
    alone = {group[0]: max(run[group[0]] for run in runs) for group, runs in found.items() if len(group) == 1}
    shares = {
        group: max((tuple(run[name] / alone[name] for name in group) for run in runs), key=sum)
        for group, runs in found.items()
        if len(group) > 1
    }
    return [Contention(activities=group, shares=each) for group, each in shares.items()]
