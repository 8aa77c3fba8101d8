"""A step as it really overlaps, worked out in order of issue on four lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines: first in, first out, whatever is waited for
host      updates the other chunks, one after the other, in the order in which the next forward needs them

The engine's order of issue is known (:mod:`protrain.planning.fetches` for uploads), and every operation starts when
its lane is free and what it needs is there: a buffer given up, a chunk updated, a gradient offloaded, a norm known. The
step after the first is the steady state.

[Note: contention] Copies in both directions share the link and the root complex, copies and the host optimizer share
the host's DRAM (not in the paper). The first pass runs every operation at its own full rate; the second stretches each
by the share of its time in which others disturbed it in the first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from protrain.planning.fetches import Fetch
from protrain.planning.timeline import DOWN, GPU, HOST, UP, Operation, Timeline


@dataclass(frozen=True, slots=True)
class Visit:
    """A unit's turn in forward or backward, under one choice of block modes and one placement."""

    name: str
    unit: int
    compute_ms: float
    chunks: tuple[int, ...]  # in buffers, that it waits for
    fetches: Sequence[Fetch]
    swap_ms: float  # saved activations out after a forward, in before a backward; 0: not swapped
    swap_ahead: int  # in backward: the unit whose activations it fetches ahead; -1: none
    gradients: tuple[tuple[int, bool], ...]  # backward: (index into Step.gradients, offloaded)


@dataclass(frozen=True, slots=True)
class Rates:
    """How operations that overlap slow each other down."""

    both_ways: float  # factor on a copy while the other direction runs
    dram_gbps: float
    host_gbps: float  # of the host optimizer alone
    up_gbps: float
    down_gbps: float


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that a step does; times in milliseconds at full rate."""

    forward: Sequence[Visit]
    backward: Sequence[Visit]
    upload_ms: Sequence[float]  # by chunk
    swap_ms: Sequence[float]  # by unit: its saved activations to the device
    gradients: Sequence[tuple[int, float, float]]  # (chunk, flatten, offload)
    device_update_ms: Sequence[tuple[int, float]]  # (chunk, update) of persistent chunks
    host_update_ms: Sequence[tuple[int, float]]  # of the others, in execution order
    update_in_backward: bool


def simulate(step: Step, rates: Rates) -> float:
    """Milliseconds of one step in steady state."""
    return _settled(step, rates).step_ms


def timeline(step: Step, rates: Rates) -> Timeline:
    """The same with every operation."""
    run = _settled(step, rates)
    begin = run.begin_ms
    operations = [
        Operation(lane=lane, name=name, start_ms=start - begin, end_ms=end - begin)
        for lane, intervals in enumerate(run.intervals)
        for name, start, end in zip(run.names[lane], *zip(*intervals, strict=True), strict=True)
        if end > start and end > begin
    ]
    return Timeline(
        step_ms=run.step_ms,
        forward_end_ms=run.forward_end_ms - begin,
        backward_end_ms=run.backward_end_ms - begin,
        operations=tuple(sorted(operations, key=lambda operation: (operation.start_ms, operation.lane))),
    )


def _settled(step: Step, rates: Rates) -> _Run:
    first = _Run(step, stretch=None)
    if len(first.intervals[UP]) + len(first.intervals[DOWN]) + len(first.intervals[HOST]) == 0:
        return first
    return _Run(step, stretch=_stretches(first.intervals, rates))


class _Run:
    """Two steps, the second of them in steady state."""

    def __init__(self, step: Step, stretch: list[list[float]] | None) -> None:
        self._step = step
        self._stretch = stretch
        self.intervals: list[list[tuple[float, float]]] = [[], [], [], []]
        self.names: list[list[str]] = [[], [], [], []]
        self._free = [0.0] * 4  # by lane
        self._updated: dict[int, float] = {}  # by chunk: its host update is done
        self._released: dict[int, float] = {}  # by chunk: the GPU has read its buffer
        self._loaded: dict[int, float] = {}
        self._offloaded: dict[int, float] = {}
        self._drained = [0.0, 0.0]  # gradient staging
        self._swapped: dict[int, float] = {}  # by unit: its activations are in host memory
        self._back: dict[int, float] = {}  # by unit: they are on the device again
        self._unsettled = 0.0
        ends = []
        for _ in range(2):
            self.begin_ms = self._free[GPU]
            self._forward()
            self.forward_end_ms = self._free[GPU]
            self._backward()
            self.backward_end_ms = self._free[GPU]
            self._update()
            ends.append(self._free[GPU])
        self.step_ms = ends[1] - ends[0]

    def _do(self, lane: int, name: str, earliest: float, duration: float) -> float:
        free = self._free[lane]
        start = free if free > earliest else earliest
        done = self.intervals[lane]
        if self._stretch is not None and lane != GPU:
            duration *= self._stretch[lane][len(done)]
        end = start + duration
        done.append((start, end))
        self.names[lane].append(name)
        self._free[lane] = end
        return end

    def _arrivals(self, visit: Visit) -> float:
        """When the weights that ``visit`` needs are there."""
        for fetch in visit.fetches:
            earliest = max(self._updated.get(fetch.chunk, 0.0), self._released.get(fetch.victim, 0.0))
            self._loaded[fetch.chunk] = self._do(
                UP, f"chunk {fetch.chunk}", earliest, self._step.upload_ms[fetch.chunk]
            )
        return max((self._loaded.get(chunk, 0.0) for chunk in visit.chunks), default=0.0)  # frozen ones may stay

    def _compute(self, visit: Visit, earliest: float) -> None:
        end = self._do(GPU, visit.name, earliest, visit.compute_ms)
        for chunk in visit.chunks:
            self._released[chunk] = end

    def _forward(self) -> None:
        for visit in self._step.forward:
            self._compute(visit, self._arrivals(visit))
            self._settle()
            if visit.swap_ms:
                self._unsettled = self._do(DOWN, f"{visit.name} activations", self._free[GPU], visit.swap_ms)
                self._swapped[visit.unit] = self._unsettled

    def _settle(self) -> None:
        """The memory of the last swapped block is given up, for which the GPU waits for the copy."""
        self._free[GPU] = max(self._free[GPU], self._unsettled)

    def _backward(self) -> None:
        self._settle()
        turn = 0
        for visit in self._step.backward:
            allocated = self._free[GPU]
            earliest = self._arrivals(visit)
            if visit.swap_ms:
                if visit.unit not in self._back:
                    self._fetch_back(visit.unit, allocated)
                earliest = max(earliest, self._back.pop(visit.unit))
            if visit.swap_ahead >= 0:
                self._fetch_back(visit.swap_ahead, allocated)
            self._compute(visit, earliest)
            for index, offloaded in visit.gradients:
                chunk, flatten_ms, offload_ms = self._step.gradients[index]
                if not offloaded:
                    self._do(GPU, f"flatten {chunk}", 0.0, flatten_ms)
                    continue
                flattened = self._do(GPU, f"flatten {chunk}", self._drained[turn], flatten_ms)
                self._drained[turn] = self._do(DOWN, f"gradient {chunk}", flattened, offload_ms)
                self._offloaded[chunk] = self._drained[turn]
                turn = 1 - turn

    def _fetch_back(self, unit: int, allocated: float) -> None:
        earliest = max(allocated, self._swapped[unit])
        self._back[unit] = self._do(UP, f"activations of {unit}", earliest, self._step.swap_ms[unit])

    def _update(self) -> None:
        known = 0.0 if self._step.update_in_backward else self._free[GPU]  # the norm
        order = self._step.host_update_ms
        for chunk, duration in reversed(order) if self._step.update_in_backward else order:
            earliest = max(known, self._offloaded.get(chunk, 0.0))
            self._updated[chunk] = self._do(HOST, f"update {chunk}", earliest, duration)
        for chunk, duration in self._step.device_update_ms:
            self._do(GPU, f"update {chunk}", 0.0, duration)


def _stretches(intervals: list[list[tuple[float, float]]], rates: Rates) -> list[list[float]]:
    """Per lane and operation the factor on its duration. See [Note: contention]."""
    sums = [_Overlap(lane) for lane in intervals]
    result: list[list[float]] = [[], [], [], []]
    for lane, other in ((UP, DOWN), (DOWN, UP)):
        alone = rates.up_gbps if lane == UP else rates.down_gbps
        for start, end in intervals[lane]:
            share = sums[other].share(start, end)
            slower = 1 + share * (rates.both_ways - 1)
            # The host optimizer takes DRAM from copies only where both together ask for more than there is.
            wanted = alone / slower + rates.host_gbps * sums[HOST].share(start, end)
            result[lane].append(slower * max(1.0, min(wanted / rates.dram_gbps, 2.0)))
    for start, end in intervals[HOST]:
        copies = rates.up_gbps * sums[UP].share(start, end) + rates.down_gbps * sums[DOWN].share(start, end)
        left = max(rates.dram_gbps - copies, 0.25 * rates.dram_gbps)
        result[HOST].append(max(1.0, rates.host_gbps / left))
    return result


class _Overlap:
    """How much of any interval the operations of one lane, which follow each other, cover."""

    def __init__(self, intervals: list[tuple[float, float]]) -> None:
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]
        self._before = [0.0]  # busy time before each operation
        for start, end in intervals:
            self._before.append(self._before[-1] + end - start)

    def share(self, start: float, end: float) -> float:
        """Between 0 and 1."""
        return (self._busy(end) - self._busy(start)) / (end - start) if end > start else 0.0

    def _busy(self, until: float) -> float:
        at = bisect_right(self._starts, until)
        if at == 0:
            return 0.0
        return self._before[at - 1] + min(until, self._ends[at - 1]) - self._starts[at - 1]
