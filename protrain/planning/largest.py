"""The deepest model of a family that has a plan on a machine, found with a handful of profiles.

Whether any plan fits depends on the memory model alone. The plans that need the least memory checkpoint every block,
and differ only in the numbers of persistent chunks and of offloaded inputs. Memory grows evenly with depth, so a
straight line through two depths almost hits the deepest model that fits. The depths around it are tried until one fits
and the next does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned, format_bytes, format_ms, per_gpu
from protrain.hardware.profile import HardwareProfile
from protrain.planning.infeasible import least_bytes, nothing_fits, some_plan_fits
from protrain.planning.layout import pack
from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import Plan
from protrain.planning.search import search
from protrain.profiler.model_profile import ModelProfile

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
