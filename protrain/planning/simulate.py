"""A step as it really overlaps, worked out in order of issue on four lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines: first in, first out, whatever is waited for
host      updates the other chunks, one after the other, in the order in which the next forward needs them

The engine's order of issue is known (:mod:`protrain.planning.fetches` for uploads), and every operation starts when
its lane is free and what it needs is there: a buffer given up, a chunk updated, a gradient offloaded, a norm known. The
step after the first is the steady state.

[Note: contention] What runs at the same time shares the link, the root complex, the host's DRAM and the card's power
(not in the paper). The first pass runs every operation at its own full rate; the second stretches each by what is left
of its rate beside the others (:mod:`protrain.planning.contention`), for the part of its time in which they ran in the
first, as if lanes were busy independently of each other within that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.contention import OTHERS, Rates
from protrain.planning.fetches import Fetch
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, UP, Operation, Timeline


@dataclass(frozen=True, slots=True)
class Visit:
    """A unit's turn in forward or backward, under one placement of the chunks."""

    name: str
    unit: int
    chunks: tuple[int, ...]  # in buffers, that it waits for
    fetches: Sequence[Fetch]
    gradients: tuple[tuple[int, bool], ...]  # backward: (index into Step.gradients, offloaded)


class Work(NamedTuple):
    """What a turn takes under one choice of block modes."""

    compute_ms: float
    swap_ms: float  # saved activations out after a forward, in before a backward; 0: not swapped
    swap_ahead: int  # in backward: the unit whose activations it fetches ahead; -1: none


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that a step does; times in milliseconds at full rate."""

    forward: Sequence[Visit]
    backward: Sequence[Visit]
    forward_work: Sequence[Work]  # by visit
    backward_work: Sequence[Work]
    upload_ms: Sequence[float]  # by chunk
    swap_ms: Sequence[float]  # by unit: its saved activations to the device
    gradients: Sequence[tuple[int, float, float]]  # (chunk, flatten, offload)
    device_update_ms: Sequence[tuple[int, float]]  # (chunk, update) of persistent chunks
    host_update_ms: Sequence[tuple[int, float]]  # of the others, in execution order
    update_in_backward: bool
    after_host_ms: float  # at least, from the last host update to the next norm, when it is not


def simulate(step: Step, rates: Rates, *, limit_ms: float = float("inf")) -> float:
    """Milliseconds of one step in steady state; at least ``limit_ms`` as soon as it cannot be less.

    Contention only makes operations longer, so the first pass bounds the second from below; so does the host optimizer
    at its disturbed rate with what must follow it.
    """
    first = _Run(step)
    if first.step_ms >= limit_ms or not first.moves:
        return first.step_ms
    overlaps = [_Overlap(lane) for lane in first.intervals]
    host = _stretches(HOST, overlaps, rates)
    if not step.update_in_backward:
        n_steady = len(host) // 2  # of one step
        updates = first.intervals[HOST][n_steady:]
        disturbed = sum((end - start) * s for (start, end), s in zip(updates, host[n_steady:], strict=True))
        if disturbed + step.after_host_ms >= limit_ms:
            return limit_ms
    return _Run(step, stretch=[*(_stretches(lane, overlaps, rates) for lane in (GPU, UP, DOWN)), host]).step_ms


def timeline(step: Step, rates: Rates) -> Timeline:
    """The same with every operation."""
    run = _Run(step, labelled=True)
    if run.moves:
        overlaps = [_Overlap(lane) for lane in run.intervals]
        run = _Run(step, stretch=[_stretches(lane, overlaps, rates) for lane in range(len(LANES))], labelled=True)
    begin = run.begin_ms
    operations = [
        Operation(lane=lane, name=f"{kind} {what}", start_ms=start - begin, end_ms=end - begin)
        for lane, intervals in enumerate(run.intervals)
        for (kind, what), (start, end) in zip(run.labels[lane], intervals, strict=True)
        if end > start and end > begin
    ]
    return Timeline(
        step_ms=run.step_ms,
        forward_end_ms=run.forward_end_ms - begin,
        backward_end_ms=run.backward_end_ms - begin,
        operations=tuple(sorted(operations, key=lambda operation: (operation.start_ms, operation.lane))),
    )


class _Run:
    """Two steps, the second of them in steady state."""

    def __init__(self, step: Step, *, stretch: list[list[float]] | None = None, labelled: bool = False) -> None:
        self._step = step
        self._stretch = stretch
        self._labelled = labelled
        self.intervals: list[list[tuple[float, float]]] = [[], [], [], []]
        self.labels: list[list[tuple[str, object]]] = [[], [], [], []]
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

    @property
    def moves(self) -> bool:
        """Whether anything but the GPU works."""
        return any(self.intervals[lane] for lane in (UP, DOWN, HOST))

    def _do(self, lane: int, kind: str, what: object, earliest: float, duration: float) -> float:
        start = self._free[lane]
        if earliest > start:
            start = earliest
        done = self.intervals[lane]
        if self._stretch is not None:
            duration *= self._stretch[lane][len(done)]
        end = start + duration
        done.append((start, end))
        if self._labelled:
            self.labels[lane].append((kind, what))
        self._free[lane] = end
        return end

    def _arrivals(self, visit: Visit) -> float:
        """When the weights that ``visit`` needs are there."""
        loaded = self._loaded
        for fetch in visit.fetches:
            chunk = fetch.chunk
            earliest = max(self._updated.get(chunk, 0.0), self._released.get(fetch.victim, 0.0))
            loaded[chunk] = self._do(UP, "weights", chunk, earliest, self._step.upload_ms[chunk])
        latest = 0.0
        for chunk in visit.chunks:
            at = loaded.get(chunk, 0.0)  # a frozen one may be there all the time
            if at > latest:
                latest = at
        return latest

    def _compute(self, kind: str, visit: Visit, work: Work, earliest: float) -> None:
        end = self._do(GPU, kind, visit.name, earliest, work.compute_ms)
        for chunk in visit.chunks:
            self._released[chunk] = end

    def _forward(self) -> None:
        for visit, work in zip(self._step.forward, self._step.forward_work, strict=True):
            self._compute("forward", visit, work, self._arrivals(visit))
            self._settle()
            if work.swap_ms:
                self._unsettled = self._do(DOWN, "activations", visit.name, self._free[GPU], work.swap_ms)
                self._swapped[visit.unit] = self._unsettled

    def _settle(self) -> None:
        """The memory of the last swapped block is given up, for which the GPU waits for the copy."""
        if self._unsettled > self._free[GPU]:
            self._free[GPU] = self._unsettled

    def _backward(self) -> None:
        self._settle()
        turn = 0
        for visit, work in zip(self._step.backward, self._step.backward_work, strict=True):
            allocated = self._free[GPU]
            earliest = self._arrivals(visit)
            if work.swap_ms:
                if visit.unit not in self._back:
                    self._fetch_back(visit.unit, allocated)
                earliest = max(earliest, self._back.pop(visit.unit))
            if work.swap_ahead >= 0:
                self._fetch_back(work.swap_ahead, allocated)
            self._compute("backward", visit, work, earliest)
            for index, offloaded in visit.gradients:
                chunk, flatten_ms, offload_ms = self._step.gradients[index]
                if not offloaded:
                    self._do(GPU, "flatten", chunk, 0.0, flatten_ms)
                    continue
                flattened = self._do(GPU, "flatten", chunk, self._drained[turn], flatten_ms)
                self._drained[turn] = self._do(DOWN, "gradients", chunk, flattened, offload_ms)
                self._offloaded[chunk] = self._drained[turn]
                turn = 1 - turn

    def _fetch_back(self, unit: int, allocated: float) -> None:
        earliest = max(allocated, self._swapped[unit])
        self._back[unit] = self._do(UP, "activations", unit, earliest, self._step.swap_ms[unit])

    def _update(self) -> None:
        known = 0.0 if self._step.update_in_backward else self._free[GPU]  # the norm
        order = self._step.host_update_ms
        for chunk, duration in reversed(order) if self._step.update_in_backward else order:
            earliest = max(known, self._offloaded.get(chunk, 0.0))
            self._updated[chunk] = self._do(HOST, "update", chunk, earliest, duration)
        for chunk, duration in self._step.device_update_ms:
            self._do(GPU, "update", chunk, 0.0, duration)


def _stretches(lane: int, overlaps: list[_Overlap], rates: Rates) -> list[float]:
    """Per operation of ``lane`` the factor on its duration. See [Note: contention]."""
    own = overlaps[lane]
    beside = [overlaps[other].shares_of(own) for other in OTHERS[lane]]
    rate = np.zeros(len(own))
    for present in product((False, True), repeat=len(beside)):
        weight = np.ones(len(own))
        for share, runs in zip(beside, present, strict=True):
            weight *= share if runs else 1.0 - share
        rate += weight * rates[lane][present]
    factors: list[float] = (1.0 / rate).tolist()
    return factors


class _Overlap:
    """How much of any interval the operations of one lane, which follow each other, cover."""

    def __init__(self, intervals: list[tuple[float, float]]) -> None:
        both = np.array(intervals, dtype=np.float64).reshape(-1, 2)
        self._starts, self._ends = both[:, 0], both[:, 1]
        self._lengths = self._ends - self._starts
        self._before = np.concatenate(([0.0], np.cumsum(self._lengths)))  # busy time before each operation

    def __len__(self) -> int:
        return len(self._lengths)

    def shares_of(self, others: _Overlap) -> NDArray[np.float64]:
        """Per operation of ``others`` the part of its time that this lane works, between 0 and 1."""
        lengths = np.maximum(others._lengths, 1e-9)
        return np.clip((self._busy(others._ends) - self._busy(others._starts)) / lengths, 0.0, 1.0)

    def _busy(self, until: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._starts.size:
            return np.zeros_like(until)
        at = np.searchsorted(self._starts, until, side="right") - 1
        inside = np.minimum(until, self._ends[at]) - self._starts[at]
        return np.where(at < 0, 0.0, self._before[at] + inside)
