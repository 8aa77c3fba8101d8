"""How far predictions are from measurements, over all points that ran: quantiles, tuned and held-out points apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.planner.descent import plan_key
from bench.planner.measure import Point
from bench.planner.results import CaseResult
from protrain.common.records import Record

_LEAST_HOST_BYTES = 256 * 1024**2  # errors are shares of at least this, as a plan without host memory has some pages


@dataclass(frozen=True, kw_only=True)
class Errors(Record):
    """Signed relative errors of predictions. 0.05 means that 5% too much was predicted."""

    points: int
    time_within_3: float  # share of points
    time_within_5: float
    time_within_10: float
    time_worst: float
    paper_within_5: float
    paper_within_10: float
    paper_worst: float
    device_median: float
    device_lowest: float
    device_highest: float
    host_lowest: float
    host_highest: float


def errors_of(results: Iterable[CaseResult]) -> Errors | None:
    """The errors over all points of ``results`` that ran, None if none did."""
    time, paper, device, host = [], [], [], []
    for result in results:
        for point in result.points:
            if point.error:
                continue
            found = result.predict(point.plan)
            time.append(found.step_ms / point.median_ms - 1)
            paper.append(found.paper_ms / point.median_ms - 1)
            device.append(found.device_bytes / point.allocated_bytes - 1)
            host.append((found.host_bytes - point.host_bytes) / max(_LEAST_HOST_BYTES, point.host_bytes))
    if not time:
        return None
    return Errors(
        points=len(time),
        time_within_3=_within(time, 0.03),
        time_within_5=_within(time, 0.05),
        time_within_10=_within(time, 0.10),
        time_worst=max(time, key=abs),
        paper_within_5=_within(paper, 0.05),
        paper_within_10=_within(paper, 0.10),
        paper_worst=max(paper, key=abs),
        device_median=sorted(device)[len(device) // 2],
        device_lowest=min(device),
        device_highest=max(device),
        host_lowest=min(host),
        host_highest=max(host),
    )


def table(results: Sequence[CaseResult]) -> str:
    """A line for every point, then the quantiles."""
    lines = [f"{result.case.name}  {result.row(point)}" for result in results for point in result.points]
    for title, held_out in (("tuned", False), ("held out", True)):
        found = errors_of(result for result in results if result.case.held_out is held_out)
        if found is not None:
            lines += ["", title, found.table()]
    return "\n".join(lines)


def regret_table(results: Sequence[CaseResult]) -> str:
    """For each case the chosen plan and the fastest plan that was found."""
    lines = []
    for result in results:
        lines += [f"{result.case.name}  {result.row(point)}" for point in result.points]
        found = regret(result)
        if found is not None:
            share, best = found
            n_plans = len({plan_key(point.plan) for point in result.points})
            compared = f"{share:+.1%} over the fastest of {n_plans}, {best}"
            lines.append(f"{result.case.name}: the chosen plan takes {compared}")
    return "\n".join(lines)


def regret(result: CaseResult) -> tuple[float, str] | None:
    """How much longer the chosen plan takes than the fastest that ran, and which that is; None where it failed.

    Where plans were measured again only those count, and of them not the first run, by which they were picked.
    """
    runs: dict[tuple[int, ...], list[Point]] = {}
    for point in result.points:
        if not point.error:
            runs.setdefault(plan_key(point.plan), []).append(point)
    if not runs or result.points[0].error:
        return None
    chosen = plan_key(result.points[0].plan)
    again = {key: points[1:] for key, points in runs.items() if len(points) > 1}
    compared = again if len(again) > 1 else runs
    times = {key: median(ms for point in points for ms in point.step_ms) for key, points in compared.items()}
    best = min(times, key=times.__getitem__)
    return times[chosen] / times[best] - 1, str(runs[best][0].plan)


def _within(errors: list[float], limit: float) -> float:
    return sum(abs(error) <= limit for error in errors) / len(errors)
