"""What each phase of a step is spent on, read from its simulated timeline.

An operation starts when the last thing that it needs is there, so one that ends at that moment set it off, and was
itself set off by another. A wait of the device is blamed on the lanes of this chain, back to the device's own operation
that it began with, by their time in it: a layer waits for an upload, but when uploads wait for updates, the host
optimizer is to blame. What limits a phase is the lane with most of the chain that its end hangs on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from protrain.common.records import Record
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, UP, Operation, Timeline

WAITS = {
    UP: "uploads",
    DOWN: "offloads",
    HOST: "host optimizer",
    STREAM: "streamed updates",
    GPU: "nothing",
}  # by lane; GPU: none is to blame
LIMITS = {**WAITS, GPU: "compute"}
_SAME_MS = 1e-6  # moments this close are one


@dataclass(frozen=True, kw_only=True)
class Phase(Record):
    """One part of the step. All it takes is computing, or waiting for something."""

    name: str
    length_ms: float
    compute_ms: float  # the device works: layers, flattening of gradients, its own updates
    waits_ms: dict[str, float]  # by what is waited for: the values of WAITS
    limit: str  # the critical resource: what must become faster for the phase to become shorter


def phases(timeline: Timeline) -> tuple[Phase, ...]:
    """Forward, backward and what follows, each with what the device does and waits for."""
    chains = _Chains(timeline)
    waits = list(chains.waits())
    bounds = (0.0, timeline.forward_end_ms, timeline.backward_end_ms, timeline.step_ms)
    result = []
    for name, begin, end in zip(("forward", "backward", "after backward"), bounds, bounds[1:], strict=False):
        waited = dict.fromkeys(WAITS.values(), 0.0)
        for start, stop, lanes in waits:
            here = _common(start, stop, begin, end)
            for lane, share in lanes.items():
                waited[WAITS[lane]] += here * share
        busy = sum(_common(op.start_ms, op.end_ms, begin, end) for op in timeline.operations if op.lane == GPU)
        path = chains.critical(begin, end)
        result.append(
            Phase(
                name=name,
                length_ms=end - begin,
                compute_ms=busy,
                waits_ms=waited,
                limit=LIMITS[max(path, key=path.__getitem__)] if any(path.values()) else WAITS[GPU],
            )
        )
    return tuple(result)


class _Chains:
    """Operations that set each other off, followed back in time: see the module's first lines."""

    def __init__(self, timeline: Timeline) -> None:
        self._step_ms = timeline.step_ms
        self._device = [operation for operation in timeline.operations if operation.lane == GPU]
        self._by_end = sorted(timeline.operations, key=lambda operation: operation.end_ms)
        self._ends = [operation.end_ms for operation in self._by_end]

    def waits(self) -> Iterator[tuple[float, float, dict[int, float]]]:
        """Every stretch in which the device does nothing: start, end, and the share of each lane in the blame."""
        free = 0.0
        ends = [(operation.start_ms, operation.end_ms) for operation in self._device]
        for start, end in (*ends, (self._step_ms, self._step_ms)):
            if start > free + _SAME_MS:
                spent = dict.fromkeys(WAITS, 0.0)
                for operation in self._back(start, GPU):
                    if operation.lane == GPU:
                        break  # the device set it off
                    spent[operation.lane] += operation.end_ms - operation.start_ms
                total = sum(spent.values())
                yield free, start, {lane: ms / total for lane, ms in spent.items()} if total else {GPU: 1.0}
            free = max(free, end)

    def critical(self, begin: float, end: float) -> dict[int, float]:
        """Milliseconds of each lane on the chain that ends at ``end``, back to ``begin``."""
        spent = dict.fromkeys(WAITS, 0.0)
        for operation in self._back(end, GPU):
            spent[operation.lane] += _common(operation.start_ms, operation.end_ms, begin, end)
            if operation.start_ms <= begin:
                break
        return spent

    def _back(self, until: float, lane: int) -> Iterator[Operation]:
        """The operation on whose end at ``until`` something on ``lane`` waited, the one that that waited for, ..."""
        while True:
            first = bisect_left(self._ends, until - _SAME_MS)
            last = bisect_right(self._ends, until + _SAME_MS)
            found = [op for op in self._by_end[first:last] if op.start_ms < until - _SAME_MS]
            if not found:
                return
            # Of two that end together the one on the same lane: an operation waits for its lane at least.
            operation = min(found, key=lambda op: (op.lane != lane, op.lane))
            yield operation
            until, lane = operation.start_ms, operation.lane


def _common(start: float, end: float, begin: float, stop: float) -> float:
    return max(0.0, min(end, stop) - max(start, begin))
