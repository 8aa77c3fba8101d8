"""One training step in steady state: what runs where and when."""

from __future__ import annotations

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
        """Names by lane, of those before streamed updates, and of the others that do anything."""
        used = {operation.lane for operation in self.operations}
        return {lane: name for lane, name in enumerate(LANES) if lane < STREAM or lane in used}
