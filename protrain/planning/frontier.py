"""Throughput by device memory: the fastest plan under each of several limits, from the least that works to all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned, format_bytes, format_ms, per_gpu
from protrain.hardware.profile import HardwareProfile
from protrain.planning.infeasible import least_bytes
from protrain.planning.layout import pack
from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import Plan
from protrain.planning.search import search
from protrain.profiler.model_profile import ModelProfile

N_LIMITS = 12


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Record):
    """The fastest plan under one limit of device memory."""

    device_limit_bytes: int
    tokens_per_s: float
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Frontier(Record):
    """Plans by device memory, in ascending order of the limit."""

    file_kind = "what `protrain plan --frontier --out` writes"

    model: str
    machine: str
    points: tuple[FrontierPoint, ...]

    def table(self) -> str:
        """A table with one line for each limit."""
        n_ranks = max((point.plan.world_size for point in self.points), default=1)
        memory = [per_gpu(f"{where} memory", n_ranks) for where in ("device", "host")]
        rows = [[memory[0], "used", memory[1], "step time", "tokens/s", "plan"]]
        for point in self.points:
            plan = point.plan
            used = [format_bytes(size) for size in (point.device_limit_bytes, plan.device_bytes, plan.host_bytes)]
            rows.append([*used, format_ms(plan.step_ms), f"{point.tokens_per_s:,.0f}", str(plan)])
        return aligned(rows, WIDTH)


def frontier(
    profile: ModelProfile, hardware: HardwareProfile, *, n_limits: int = N_LIMITS, step_during_backward: bool = False
) -> Frontier:
    """The fastest plans for ``profile`` under ``n_limits`` limits of device memory, in even ratios.

    The last limit is all the device memory there is. If the fastest plan leaves much of that unused, the last limit is
    what that plan uses, and all there is is one more limit. More memory never makes a step slower: if the search finds
    nothing faster under a larger limit, the plan of the smaller limit stays.

    Raises:
        PlanError: nothing fits ``hardware``.
    """
    whole = search(profile, hardware, step_during_backward=step_during_backward)
    least = least_device_bytes(profile, hardware, step_during_backward=step_during_backward)
    assert least is not None, "a plan fits, so the one that takes least does"
    used = max(least, whole.device_bytes)
    top = hardware.device_bytes if used > 0.9 * hardware.device_bytes else used
    ratios = [(top / least) ** (index / (n_limits - 1)) for index in range(n_limits)]
    limits = {min(top, max(least, round(least * ratio))) for ratio in ratios} | {hardware.device_bytes}
    points: list[FrontierPoint] = []
    for limit in sorted(limits):
        before = [point.plan for point in points[-1:]]
        machine = replace(hardware, device_bytes=limit)
        plan = search(profile, machine, step_during_backward=step_during_backward, known=before)
        plan = min([plan, *before], key=attrgetter("step_ms"))
        points.append(FrontierPoint(device_limit_bytes=limit, tokens_per_s=plan.tokens_per_s, plan=plan))
    return Frontier(model=profile.model, machine=hardware.name, points=tuple(points))


def least_device_bytes(
    profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False
) -> int | None:
    """The least device memory of any plan that fits the machine's host memory, None if no plan does."""
    memory = MemoryModel(
        profile, hardware, pack(profile, world_size=hardware.world_size), update_in_backward=step_during_backward
    )
    device, host = least_bytes(memory)
    return min(device[host <= hardware.host_bytes].tolist(), default=None)
