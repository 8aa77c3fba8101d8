"""One training step in steady state: what runs where and when, and what each phase of it is spent on.

An operation starts when the last thing that it needs is ready. So an operation that ends at that moment set it off, and
was itself set off by another one. The device waits at the end of such a chain, which goes back to an operation of the
device itself. A wait is blamed on the lanes of its chain, in proportion to their time in the chain. If a layer waits
for an upload and the upload waits for an update, the host optimizer gets its part of the blame. What limits a phase is
the lane with the most time in the chain that ends with the phase.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from protrain.common.records import Record

# Most plans leave the lane of updates that the GPU makes in host memory idle. The last two are of several ranks alone.
LANES = ("GPU", "host to device", "device to host", "host optimizer", "streamed updates", "gathers", "reductions")
GPU, UP, DOWN, HOST, STREAM, GATHER, REDUCE = range(7)


def lanes_of(world_size: int) -> tuple[str, ...]:
    """Names of the lanes that a step of ``world_size`` ranks may use."""
    return LANES if world_size > 1 else LANES[:GATHER]


def common_ms(start_ms: float, end_ms: float, begin_ms: float, stop_ms: float) -> float:
    """How long two spans of time overlap."""
    return max(0.0, min(end_ms, stop_ms) - max(start_ms, begin_ms))


@dataclass(frozen=True, kw_only=True)
class Operation(Record):
    """Something that a lane does without interruption."""

    lane: int  # index into LANES
    name: str
    start_ms: float  # from the start of the step's forward; negative if the step before began it
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class Timeline(Record):
    """The operations of one step, by start time."""

    step_ms: float
    forward_end_ms: float
    backward_end_ms: float
    operations: tuple[Operation, ...]

    def busy_ms(self, lane: int, begin_ms: float, end_ms: float) -> float:
        """How long ``lane`` works from ``begin_ms`` to ``end_ms``. Of other times nothing counts."""
        found = (operation for operation in self.operations if operation.lane == lane)
        return sum(common_ms(operation.start_ms, operation.end_ms, begin_ms, end_ms) for operation in found)

    @property
    def lanes(self) -> dict[int, str]:
        """Names by lane, of the GPU and the copies, and of the others that do anything."""
        used = {operation.lane for operation in self.operations}
        return {lane: name for lane, name in enumerate(LANES) if lane < HOST or lane in used}


WAITS = {
    UP: "uploads",
    DOWN: "offloads",
    HOST: "host optimizer",
    STREAM: "streamed updates",
    GATHER: "gathers",
    REDUCE: "reductions",
    GPU: "nothing",
}  # by lane; a wait that no other lane is to blame for is under GPU
LIMITS = {**WAITS, GPU: "compute"}
_SAME_MS = 1e-6  # moments this close count as the same


@dataclass(frozen=True, kw_only=True)
class Phase(Record):
    """One part of the step. The device is either computing or waiting for something."""

    name: str
    length_ms: float
    compute_ms: float  # the device is busy with layers, flattening of gradients, or updates of persistent chunks
    waits_ms: dict[str, float]  # by what is waited for: the values of WAITS, with one rank without those of collectives
    limit: str  # the critical resource, which must become faster for the phase to become shorter


def phases(timeline: Timeline) -> tuple[Phase, ...]:
    """Forward, backward and the time after it, each with what the device does and waits for."""
    chains = _Chains(timeline)
    waits = list(chains.waits())
    absent = {GATHER, REDUCE} - {operation.lane for operation in timeline.operations}
    bounds = (0.0, timeline.forward_end_ms, timeline.backward_end_ms, timeline.step_ms)
    result = []
    for name, begin, end in zip(("forward", "backward", "after backward"), bounds, bounds[1:], strict=False):
        waited = dict.fromkeys((name for lane, name in WAITS.items() if lane not in absent), 0.0)
        for start, stop, lanes in waits:
            here = common_ms(start, stop, begin, end)
            for lane, share in lanes.items():
                if lane not in absent:
                    waited[WAITS[lane]] += here * share
        path = chains.critical(begin, end)
        result.append(
            Phase(
                name=name,
                length_ms=end - begin,
                compute_ms=timeline.busy_ms(GPU, begin, end),
                waits_ms=waited,
                limit=LIMITS[max(path, key=path.__getitem__)] if any(path.values()) else WAITS[GPU],
            )
        )
    return tuple(result)


class _Chains:
    """Chains of operations that set each other off, followed back in time: see the module's docstring."""

    def __init__(self, timeline: Timeline) -> None:
        self._step_ms = timeline.step_ms
        self._device = [operation for operation in timeline.operations if operation.lane == GPU]
        self._by_end = sorted(timeline.operations, key=lambda operation: operation.end_ms)
        self._ends = [operation.end_ms for operation in self._by_end]

    def waits(self) -> Iterator[tuple[float, float, dict[int, float]]]:
        """Every time in which the device is idle: its start, its end, and the share of each lane in the blame."""
        free = 0.0
        ends = [(operation.start_ms, operation.end_ms) for operation in self._device]
        for start, end in (*ends, (self._step_ms, self._step_ms)):
            if start > free + _SAME_MS:
                spent = dict.fromkeys(WAITS, 0.0)
                for operation in self._back(start):
                    if operation.lane == GPU:
                        break  # the chain begins with the device's own operation
                    spent[operation.lane] += operation.end_ms - operation.start_ms
                total = sum(spent.values())
                yield free, start, {lane: ms / total for lane, ms in spent.items()} if total else {GPU: 1.0}
            free = max(free, end)

    def critical(self, begin: float, end: float) -> dict[int, float]:
        """Milliseconds of each lane in the chain that ends at ``end``, followed back to ``begin``."""
        spent = dict.fromkeys(WAITS, 0.0)
        for operation in self._back(end):
            spent[operation.lane] += common_ms(operation.start_ms, operation.end_ms, begin, end)
            if operation.start_ms <= begin:
                break
        return spent

    def _back(self, until: float) -> Iterator[Operation]:
        """The chain that ends on the GPU at ``until`` milliseconds, its last operation first."""
        lane = GPU
        while True:
            first = bisect_left(self._ends, until - _SAME_MS)
            last = bisect_right(self._ends, until + _SAME_MS)
            found = [op for op in self._by_end[first:last] if op.start_ms < until - _SAME_MS]
            if not found:
                return
            # If several operations end together, the one on the same lane is taken: an operation always waits for it.
            operation = min(found, key=lambda op: (op.lane != lane, op.lane))
            yield operation
            until, lane = operation.start_ms, operation.lane
