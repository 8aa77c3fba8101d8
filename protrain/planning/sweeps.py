"""Searches for many cases: several machines side by side, limits of device memory, and the deepest model that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Self

from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned, format_bytes, format_ms, per_gpu
from protrain.hardware.profile import HardwareProfile
from protrain.planning.answer import Answer
from protrain.planning.fits import least_bytes, nothing_fits, some_plan_fits
from protrain.planning.layout import pack
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import Plan
from protrain.planning.search import search
from protrain.profiler.model_profile import ModelProfile

N_LIMITS = 12  # of device memory, in a frontier
_CLEARLY = 1.005  # times as fast is worth another batch


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """One model on several machines, the cheapest first if prices are known, otherwise the fastest."""

    file_kind = "what `protrain plan --compare --out` writes"

    machines: dict[str, Answer]  # by what the user called them

    @classmethod
    def of(cls, answers: Mapping[str, Answer]) -> Self:
        """The comparison of ``answers``, by what their machines are called."""
        return cls(machines=dict(sorted(answers.items(), key=lambda pair: pair[1].token_price)))

    def table(self) -> str:
        """A table with one line for each machine, at most 80 columns wide where the names of machines are short."""
        rows = [["machine", "fits", "tokens/s", "a GPU", str(next(iter(self.machines.values())).job), "limited by"]]
        for name, answer in self.machines.items():
            cells = ["no", "-", "-", "-", answer.lacks]
            if answer.tokens_per_s is not None:
                rates = [f"{rate:,.0f}" for rate in (answer.tokens_per_s, answer.tokens_per_s / answer.machine.gpus)]
                limit, share = next(iter(answer.limits.items()))
                bill = answer.job.bill(answer.tokens_per_s, answer.machine.gpus)
                cells = ["yes", *rates, bill, f"{limit}, {share:.0%}"]
            rows.append([name, *cells])
        return aligned(rows, WIDTH)


def fastest_batches(
    profile_of: Callable[[int], ModelProfile],
    hardware: HardwareProfile,
    *,
    first: int,
    n_sequences: int,
) -> list[int]:
    """The sizes of batches by which a GPU may take ``n_sequences`` in a step, the fastest first.

    From ``first`` sequences on, a batch doubles for as long as that is clearly faster, and another one halves. The
    faster one of the two is chosen. Speeds are those of searches from one start.

    Args:
        profile_of: the profile of a batch of so many sequences.
        hardware: the machine and its limits.
        first: the sequences of the batch to begin with, if a step has as many.
        n_sequences: of a step on each GPU.

    Returns:
        The sequences of every batch that was tried and fits. Those of the chosen batch come first.
    """
    speeds: dict[int, float] = {}  # in tokens a second, of batches that fit

    @cache
    def speed(batch: int) -> float:
        changed = replace(profile_of(batch), accumulation=n_sequences // batch)
        with suppress(PlanError):
            plan = search(changed, hardware, n_starts=1)
            speeds[batch] = plan.tokens_per_s
        return speeds.get(batch, 0.0)

    small = large = min(first, 1 << (n_sequences.bit_length() - 1))
    while 2 * large <= n_sequences and speed(2 * large) > _CLEARLY * speed(large):
        large *= 2
    while small > 1 and speed(small // 2) >= _CLEARLY * speed(small):
        small //= 2
    batch = max(small, large, key=speed)
    return sorted(speeds, key=lambda tried: (tried != batch, -speeds[tried]))


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Record):
    """The fastest plan under one limit of device memory."""

    device_limit_bytes: int
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
        n_ranks = self.points[0].plan.world_size
        memory = [per_gpu(f"{where} memory", n_ranks) for where in ("device", "host")]
        rows = [[memory[0], "used", memory[1], "step time", "tokens/s", "plan"]]
        for point in self.points:
            plan = point.plan
            used = [format_bytes(size) for size in (point.device_limit_bytes, plan.device_bytes, plan.host_bytes)]
            rows.append([*used, format_ms(plan.step_ms), f"{plan.tokens_per_s:,.0f}", str(plan)])
        return aligned(rows, WIDTH)


def frontier(profile: ModelProfile, hardware: HardwareProfile, *, n_limits: int = N_LIMITS) -> Frontier:
    """The fastest plans for ``profile`` under ``n_limits`` limits of device memory, in even ratios.

    The last limit is all the device memory there is, with the plan that ``search`` finds there. The others go from the
    least that works towards what that plan uses. Every search below also starts from the plan of the limit before.
    Plans are judged as ``search`` judges them, so a plan for less memory may have a slightly shorter step on the host
    as it was calibrated.

    Raises:
        PlanError: nothing fits ``hardware``.
    """
    whole = search(profile, hardware)
    least = least_device_bytes(profile, hardware)
    assert least is not None, "a plan fits, so the one that takes least does"
    ratio = max(1.0, whole.device_bytes / least)
    limits = {round(least * ratio ** (index / (n_limits - 1))) for index in range(n_limits - 1)}
    points: list[FrontierPoint] = []
    for limit in sorted(limits - {hardware.device_bytes}):
        machine, before = replace(hardware, device_bytes=limit), [point.plan for point in points[-1:]]
        plan = search(profile, machine, known=before)
        points.append(FrontierPoint(device_limit_bytes=limit, plan=plan))
    points.append(FrontierPoint(device_limit_bytes=hardware.device_bytes, plan=whole))
    return Frontier(model=profile.model, machine=hardware.name, points=tuple(points))


def least_device_bytes(profile: ModelProfile, hardware: HardwareProfile) -> int | None:
    """The least device memory of any plan that fits the machine's host memory, None if no plan does."""
    device, host = least_bytes(MemoryModel(profile, hardware, pack(profile, world_size=hardware.world_size)))
    return min(device[host <= hardware.host_bytes].tolist(), default=None)


MOST_LAYERS = 512


@dataclass(frozen=True, kw_only=True)
class Largest(Record):
    """The deepest model that fits."""

    file_kind = "what `protrain plan --max-model --out` writes"

    machine: str
    layers: int
    parameters: int
    plan: Plan
    one_more: str  # why one layer more does not fit; "" if the search ended at its own limit

    def table(self) -> str:
        """The result as text."""
        plan = self.plan
        rows = [
            ["layers", str(self.layers)],
            ["parameters", f"{self.parameters:,}"],
            ["plan", str(plan)],
            ["step", f"{format_ms(plan.step_ms)}, {plan.tokens_per_s:,.0f} tokens/s"],
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
) -> Largest:
    """The deepest model with a plan on ``hardware``.

    Args:
        profile_of: the profile of the model with so many layers.
        hardware: the machine and its limits.
        most_layers: where to stop looking.

    Raises:
        PlanError: not even one layer fits.
    """

    @cache
    def memory(layers: int) -> MemoryModel:
        profile = profile_of(layers)
        return MemoryModel(profile, hardware, pack(profile, world_size=hardware.world_size))

    low, high = 0, most_layers + 1  # low fits, and high does not
    while high - low > 1:
        layers = (low + high) // 2
        low, high = (layers, high) if some_plan_fits(memory(layers)) else (low, layers)
    if not low:
        raise nothing_fits(memory(1))
    chosen = memory(low).profile
    plan = search(chosen, hardware)
    return Largest(
        machine=hardware.name,
        layers=low,
        parameters=chosen.n_parameters,
        plan=plan,
        one_more="" if high > most_layers else str(replace(nothing_fits(memory(high)), remedy="")).strip(),
    )
