"""The fastest plans of one model on several machines, side by side, with what limits each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned
from protrain.hardware.profile import HardwareProfile
from protrain.planning.plan import Plan
from protrain.planning.predict import predict
from protrain.planning.search import search
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, REDUCE, STREAM, UP
from protrain.profiler.model_profile import ModelProfile

_LIMITS = {"GPU": (GPU,), "host": (HOST,), "links": (UP, DOWN, STREAM), "collectives": (GATHER, REDUCE)}


@dataclass(frozen=True, kw_only=True)
class Compared(Record):
    """The fastest plan on one machine, or why there is none."""

    machine: str  # as the user named it
    name: str  # of its profile
    n_gpus: int  # of all nodes together
    plan: Plan | None
    tokens_per_s: float  # of all GPUs; 0 where nothing fits
    limited_by: str  # what works for the longest part of the step, or the memory that is too small
    busy_share: float  # that part of the step
    gather_gbps: float | None  # what a GPU receives in gathers; None for one GPU
    gather_known: str  # "measured", "composed", or "assumed" to be what the link carries
    error: str  # why nothing fits, and what would


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """One model on several machines, in the order in which they were given."""

    file_kind = "what `protrain plan --compare --out` writes"

    model: str
    machines: tuple[Compared, ...]

    def table(self) -> str:
        """A table with one line for each machine, at most 80 columns wide where the names of machines are short."""
        rows = [["machine", "fits", "tokens/s", "a GPU", "limited by", "gathers"]]
        for each in self.machines:
            gathers = "-"
            if each.gather_gbps is not None:
                gathers = f"{each.gather_gbps:.3g} GB/s, {each.gather_known}"
            answer = ["no", "-", "-", each.limited_by]
            if each.plan is not None:
                rates = [f"{rate:,.0f}" for rate in (each.tokens_per_s, each.tokens_per_s / each.n_gpus)]
                answer = ["yes", *rates, f"{each.limited_by}, {each.busy_share:.0%}"]
            rows.append([each.machine, *answer, gathers])
        return aligned(rows, WIDTH)


def compare(
    profile: ModelProfile, machines: Mapping[str, HardwareProfile], *, step_during_backward: bool = False
) -> Comparison:
    """The fastest plan for ``profile`` on each of ``machines``, whose keys are what to call them."""
    return Comparison(
        model=profile.model,
        machines=tuple(_compared(profile, name, machines[name], step_during_backward) for name in machines),
    )


def _compared(profile: ModelProfile, machine: str, hardware: HardwareProfile, inside: bool) -> Compared:
    plan: Plan | None = None
    limited_by, busy_share, error = "", 0.0, ""
    try:
        plan = search(profile, hardware, step_during_backward=inside)
    except PlanError as why:
        limited_by, error = f"{why.where} memory", str(why)
    else:
        timeline = predict(profile, hardware, plan, step_during_backward=inside).timeline
        end_ms = timeline.step_ms
        busy = {name: max(timeline.busy_ms(lane, 0.0, end_ms) for lane in lanes) for name, lanes in _LIMITS.items()}
        limited_by = max(busy, key=busy.__getitem__)
        busy_share = busy[limited_by] / end_ms
    several = hardware.world_size > 1
    return Compared(
        machine=machine,
        name=hardware.name,
        n_gpus=hardware.world_size,
        plan=plan,
        tokens_per_s=plan.tokens_per_s if plan is not None else 0.0,
        limited_by=limited_by,
        busy_share=busy_share,
        gather_gbps=(hardware.all_gather_gbps or hardware.h2d_gbps) if several else None,
        gather_known=hardware.known("all_gather_gbps") if several else "",
        error=error,
    )
