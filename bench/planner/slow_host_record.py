"""What bench.planner.slow_host writes: every plan on every host, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from bench.dram_load import Load
from bench.planner.cases import Case
from protrain.common.records import Record
from protrain.common.tables import aligned
from protrain.planning import Plan


@dataclass(frozen=True, kw_only=True)
class Host(Record):
    """A host beside a load."""

    share: float  # of its AdamW rate that the load leaves; 1 without a load
    after: float | None = None  # the share until the first step; None: it has settled before the steps that count

    def __str__(self) -> str:
        return f"{self.share:.0%}" + ("" if self.after is None else f" after {self.after:.0%}")


@dataclass(frozen=True, kw_only=True)
class Tried(Record):
    """A plan."""

    name: str
    shares: tuple[float, ...]  # the hosts that it is measured on
    plan: Plan
    error: str = ""  # the reason if it did not run


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """A plan on a host."""

    tried: int  # index into SlowHost.tried
    host: Host
    step_ms: tuple[float, ...]  # of all steps in order
    untimed: int  # the first of them, which do not count
    predicted_ms: float  # for such a host
    host_gparams: float  # 1e9 parameters a second that the host updated in these steps
    streamed_updates: int  # in all these steps, as are the next two
    speculative_updates: int
    redone_updates: int  # more than 0 if a step was not as its speculative updates had assumed
    compiled_graphs: int  # in this process until then; many mean that the compiler may have given up

    @property
    def timed_ms(self) -> tuple[float, ...]:
        """The steps that count."""
        return self.step_ms[self.untimed :]

    @property
    def typical_ms(self) -> float:
        """The median step on a settled host, and the mean step while the load is switched."""
        return statistics.median(self.timed_ms) if self.host.after is None else statistics.mean(self.timed_ms)


@dataclass(frozen=True, kw_only=True)
class Floor(Record):
    """Forward and backward alone, with the recomputed blocks of the plan for the host as it is."""

    share: float
    step_ms: tuple[float, ...]
    untimed: int

    @property
    def typical_ms(self) -> float:
        """The median step."""
        return statistics.median(self.step_ms[self.untimed :])


@dataclass(frozen=True, kw_only=True)
class SlowHost(Record):
    """A whole run."""

    file_kind = "what bench.planner.slow_host writes"

    commands: tuple[str, ...]  # more than one where a run was gone on with
    device: str
    versions: dict[str, str]
    case: Case
    calibrated_gparams: float  # the host's AdamW
    steps: int  # timed, on a settled host
    switch_every: int  # steps; 0: the load is not switched
    loads: tuple[Load, ...] = ()  # of each command
    tried: tuple[Tried, ...] = ()
    measured: tuple[Row, ...] = ()
    floors: tuple[Floor, ...] = ()

    def loaders(self, share: float) -> float:
        """How many loaders leave the host ``share`` of its rate; 0 if it is not known."""
        return next((load.loaders for load in self.loads if load.share == share), 0.0)

    def has(self, tried: int, host: Host) -> bool:
        """Whether a plan was measured on ``host``."""
        return any((row.tried, row.host) == (tried, host) for row in self.measured)

    def fastest_ms(self, share: float) -> float:
        """The step of the fastest plan on a settled host."""
        return min(row.typical_ms for row in self.measured if row.host == Host(share=share))

    @property
    def floor_ms(self) -> float | None:
        """The floor without load, which is not longer than that beside a load; None if it was not measured."""
        return next((floor.typical_ms for floor in self.floors if floor.share == 1.0), None)

    def table(self) -> str:
        """The slowest host first, and on each the plan for the host as it is before the others."""
        titles = ("host", "plan", "ms a step (least to most)", "floor", "over the fastest", "predicted")
        lines: list[tuple[str, ...]] = [(*titles, "host G params/s", "streamed a step", "numbers of the plan")]
        hosts = sorted(
            {row.host for row in self.measured}, key=lambda host: (host.share, host.after is None, host.after or 0.0)
        )
        for host in hosts:
            of_host = sorted((row for row in self.measured if row.host == host), key=lambda row: row.tried)
            lines += [self._line(row) for row in of_host]
        lines += [
            (f"{one.share:.0%}", "floor", _times(one.typical_ms, one.step_ms[one.untimed :])) + ("",) * 6
            for one in sorted(self.floors, key=lambda one: one.share)
        ]
        failed = [f"{one.name}: {one.error}" for one in self.tried if one.error]
        calibrated = f"host calibrated at {self.calibrated_gparams:.2f} G parameters a second"
        head = f"{self.case.name}, {self.device}, {calibrated}"
        return "\n".join([head, *map(str, self.loads), "", aligned(lines), *failed])

    def _line(self, row: Row) -> tuple[str, ...]:
        floor_ms, fastest = self.floor_ms, ""
        if row.host.after is None:
            fastest = f"{row.typical_ms / self.fastest_ms(row.host.share) - 1:+.1%}"
        return (
            str(row.host),
            self.tried[row.tried].name,
            _times(row.typical_ms, row.timed_ms),
            "" if floor_ms is None else f"{floor_ms / row.typical_ms:.1%}",
            fastest,
            f"{row.predicted_ms:.0f}",
            f"{row.host_gparams:.2f}",
            f"{row.streamed_updates / len(row.step_ms):.1f}",
            str(self.tried[row.tried].plan),
        )


def _times(typical_ms: float, step_ms: Iterable[float]) -> str:
    steps = tuple(step_ms)
    return f"{typical_ms:.1f} ({min(steps):.1f} to {max(steps):.1f})"
