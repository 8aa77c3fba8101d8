"""Searches for many cases: several machines side by side, limits of device memory, and the deepest model that fits.

[Note: the deepest model] It is found with a handful of profiles. Whether any plan fits depends on the memory model
alone. The plans that need the least memory checkpoint every block, and differ only in the numbers of persistent chunks
and of offloaded inputs. Memory grows evenly with depth, so a straight line through two depths almost hits the deepest
model that fits. The depths around it are tried until one fits and the next does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned, format_bytes, format_ms, per_gpu
from protrain.hardware.profile import HardwareProfile
from protrain.planning.answer import Answer, explain
from protrain.planning.fits import least_bytes, nothing_fits, some_plan_fits
from protrain.planning.layout import pack
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import Plan
from protrain.planning.search import search
from protrain.profiler.model_profile import ModelProfile

N_LIMITS = 12  # of device memory, in a frontier


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """One model on several machines, in the order in which they were given."""

    file_kind = "what `protrain plan --compare --out` writes"

    model: str
    machines: dict[str, Answer]  # by what the user called them

    def table(self) -> str:
        """A table with one line for each machine, at most 80 columns wide where the names of machines are short."""
        rows = [["machine", "fits", "tokens/s", "a GPU", "limited by", "gathers"]]
        for name, answer in self.machines.items():
            cells = ["no", "-", "-", answer.lacks]
            if answer.tokens_per_s is not None:
                rates = [f"{rate:,.0f}" for rate in (answer.tokens_per_s, answer.tokens_per_s / answer.machine.gpus)]
                limit, share = next(iter(answer.limits.items()))
                cells = ["yes", *rates, f"{limit}, {share:.0%}"]
            rows.append([name, *cells, answer.machine.collectives.get("gathers", "-")])
        return aligned(rows, WIDTH)


def compare(
    profile: ModelProfile, machines: Mapping[str, HardwareProfile], *, step_during_backward: bool = False
) -> Comparison:
    """The fastest plan for ``profile`` on each of ``machines``, whose keys are what to call them."""

    def answer(hardware: HardwareProfile) -> Answer:
        how: dict[str, Any] = {"step_during_backward": step_during_backward}
        try:
            return explain(search(profile, hardware, **how), profile, hardware, more_memory=False, **how)
        except PlanError as why:
            return Answer.refused(why, hardware, profile)

    return Comparison(model=profile.model, machines={name: answer(machines[name]) for name in machines})


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


MOST_LAYERS = 512
_GUESSES = 8  # the number of tries by a straight line, before bisection takes over


@dataclass(frozen=True, kw_only=True)
class Largest(Record):
    """The deepest model that fits."""

    file_kind = "what `protrain plan --max-model --out` writes"

    machine: str
    layers: int
    parameters: int
    tokens_per_s: float
    plan: Plan
    one_more: str  # why one layer more does not fit; "" if the search ended at its own limit

    def table(self) -> str:
        """The result as text."""
        plan = self.plan
        rows = [
            ["layers", str(self.layers)],
            ["parameters", f"{self.parameters:,}"],
            ["plan", str(plan)],
            ["step", f"{format_ms(plan.step_ms)}, {self.tokens_per_s:,.0f} tokens/s"],
            [
                per_gpu("memory", plan.world_size),
                f"device {format_bytes(plan.device_bytes)}, host {format_bytes(plan.host_bytes)}",
            ],
            ["one layer more", self.one_more or f"not tried: {MOST_LAYERS} layers are where the search ends"],
        ]
        return aligned(rows, WIDTH)


def largest(
    profile_of: Callable[[int], ModelProfile],
    hardware: HardwareProfile,
    *,
    most_layers: int = MOST_LAYERS,
    step_during_backward: bool = False,
) -> Largest:
    """The deepest model with a plan on ``hardware``.

    Args:
        profile_of: the profile of the model with so many layers.
        hardware: the machine and its limits.
        most_layers: where to stop looking.
        step_during_backward: plan for updates inside backward.

    Raises:
        PlanError: not even one layer fits.
    """
    known: dict[int, MemoryModel] = {}  # by layers

    def fits(layers: int) -> bool:
        if layers not in known:
            profile = profile_of(layers)
            layout = pack(profile, world_size=hardware.world_size)
            known[layers] = MemoryModel(profile, hardware, layout, update_in_backward=step_during_backward)
        return some_plan_fits(known[layers])

    low, high = 1, most_layers + 1  # low fits, and high is assumed not to
    if not fits(low):
        raise nothing_fits(known[low])
    guess = 4
    for tries in itertools.count(1):
        if high - low == 1:
            break
        layers = min(max(guess, low + 1), high - 1)
        low, high = (layers, high) if fits(layers) else (low, layers)
        guess = _guess(known, hardware) if tries < _GUESSES else (low + high) // 2
    chosen = known[low].profile
    plan = search(chosen, hardware, step_during_backward=step_during_backward)
    return Largest(
        machine=hardware.name,
        layers=low,
        parameters=chosen.n_parameters,
        tokens_per_s=plan.tokens_per_s,
        plan=plan,
        one_more="" if high > most_layers else str(nothing_fits(known[high])),
    )


def _guess(known: dict[int, MemoryModel], hardware: HardwareProfile) -> int:
    """The deepest model that fits, by straight lines through the two deepest that were tried."""
    first, second = sorted(known)[-2:]
    # States and activations are in one memory or the other. With all of them away, the host has the most.
    (device_before, both_before), (device, both) = (
        (int(on_device.min()), int(on_device.min() + on_host.max()))
        for on_device, on_host in (least_bytes(known[layers]) for layers in (first, second))
    )
    found = float(MOST_LAYERS)
    for before, at, limit in (
        (device_before, device, hardware.device_bytes),
        (both_before, both, hardware.device_bytes + hardware.host_bytes),
    ):
        if at > before:
            found = min(found, second + (limit - at) * (second - first) / (at - before))
    return int(max(found, 0))
