"""Recorded measurements, and what today's models predict for them.

A result holds the profile and the machine that plans were made from. So a changed model can be judged by recorded
measurements, without measuring again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.planner.cases import Case
from bench.planner.measure import Point
from bench.planner.paper import paper_step_ms
from protrain.common.records import Record
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Models, Plan
from protrain.profiler.model_profile import ModelProfile

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class CaseResult(Record):
    """All points of one case. The first is the plan that the planner chose."""

    case: Case
    hardware: HardwareProfile
    profile: ModelProfile
    points: tuple[Point, ...]

    def with_point(self, point: Point) -> CaseResult:
        """These results with one more point."""
        return replace(self, points=(*self.points, point))

    def predict(self, plan: Plan) -> Prediction:
        """Time and memory of ``plan`` as today's models predict them."""
        models = Models.of(plan, replace(self.profile, step_during_backward=not self.case.clip), self.hardware)
        found = models.plan(plan.counts, plan.block_modes)
        return Prediction(
            step_ms=found.step_ms,
            paper_ms=paper_step_ms(plan, models.profile, self.hardware, models.layout),
            device_bytes=found.device_bytes - self.hardware.collective_bytes,
            host_bytes=found.host_bytes,
        )

    def row(self, point: Point) -> str:
        """One line about ``point``."""
        if point.error:
            return f"{point.plan}: {point.error}"
        found, measured = self.predict(point.plan), point.median_ms
        return (
            f"{point.plan}: {found.step_ms:.0f} of {measured:.0f} ms ({found.step_ms / measured - 1:+.1%}; "
            f"paper {found.paper_ms / measured - 1:+.1%}), device {found.device_bytes / GIB:.2f} of "
            f"{point.allocated_bytes / GIB:.2f} GiB ({found.device_bytes / point.allocated_bytes - 1:+.1%}; reserved "
            f"{point.reserved_bytes / GIB:.2f}), host {found.host_bytes / GIB:.2f} of "
            f"{point.host_bytes / GIB:.2f} GiB, AdamW on the host {point.host_gparams:.1f} G/s, "
            f"wrapped in {point.wrap_s:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one plan."""

    step_ms: float
    paper_ms: float
    device_bytes: int  # of torch's allocator, whose peak is measured
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Results(Record):
    """A whole run of the benchmark."""

    command: str
    device: str
    versions: dict[str, str]
    cases: tuple[CaseResult, ...]
    slow_link: dict[str, float] | None = None  # of a record that was made beside a load on the links
