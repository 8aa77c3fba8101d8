"""Searches for many cases: several machines side by side, batches, and the deepest model that fits."""

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
from protrain.planning.fits import nothing_fits, some_plan_fits
from protrain.planning.layout import pack
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import Plan
from protrain.planning.search import search
from protrain.profiler.model_profile import ModelProfile

MOST_LAYERS = 512
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
