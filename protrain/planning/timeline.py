"""One training step in steady state: what runs where and when."""

from __future__ import annotations

from dataclasses import dataclass

from protrain.common.records import Record

# Most plans leave the lane of updates that the GPU makes in host memory idle. The last two are of several ranks alone.
LANES = ("GPU", "host to device", "device to host", "host optimizer", "streamed updates", "gathers", "reductions")
GPU, UP, DOWN, HOST, STREAM, GATHER, REDUCE = range(7)


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

    @property
    def lanes(self) -> dict[int, str]:
        """Names by lane, of those before streamed updates, and of the others that do anything."""
        used = {operation.lane for operation in self.operations}
        return {lane: name for lane, name in enumerate(LANES) if lane < STREAM or lane in used}
