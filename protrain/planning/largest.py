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

from protrain.common.errors import PlanError
from protrain.common.quantities import format_bytes
from protrain.common.records import Record
from protrain.common.tables import WIDTH, aligned, format_ms, per_gpu
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
            ["step", f"{format_ms(plan.step_ms)}, {self.tokens_per_s:,.4g} tokens/s"],
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
    known: dict[int, _Need] = {}

    def need(layers: int) -> _Need:
        if layers not in known:
            known[layers] = _need(profile_of(layers), hardware, step_during_backward)
        return known[layers]

    low, high = 1, most_layers + 1  # low fits, and high is assumed not to
    if (error := need(low).error) is not None:
        raise error
    guess = 4
    for tries in itertools.count(1):
        if high - low == 1:
            break
        layers = min(max(guess, low + 1), high - 1)
        low, high = (layers, high) if need(layers).error is None else (low, layers)
        guess = _guess(known, hardware) if tries < _GUESSES else (low + high) // 2
    chosen = need(low)
    plan = search(chosen.profile, hardware, step_during_backward=step_during_backward)
    return Largest(
        machine=hardware.name,
        layers=low,
        parameters=chosen.profile.n_parameters,
        tokens_per_s=plan.tokens_per_s,
        plan=plan,
        one_more="" if high > most_layers else str(need(high).error),
    )


@dataclass(frozen=True, kw_only=True)
class _Need:
    """The least memory that one depth needs."""

    profile: ModelProfile
    device_bytes: int  # the least of any plan
    host_bytes: int  # with all chunks and all offloaded inputs in host memory
    error: PlanError | None  # why no plan fits; None if one does


def _need(profile: ModelProfile, hardware: HardwareProfile, step_during_backward: bool) -> _Need:
    memory = MemoryModel(
        profile, hardware, pack(profile, world_size=hardware.world_size), update_in_backward=step_during_backward
    )
    device, host = least_bytes(memory)
    return _Need(
        profile=profile,
        device_bytes=int(device.min()),
        host_bytes=int(host.max()),
        error=None if some_plan_fits(memory) else nothing_fits(memory),
    )


def _guess(known: dict[int, _Need], hardware: HardwareProfile) -> int:
    """The deepest model that fits, by straight lines through the two deepest that were tried."""
    first, second = sorted(known)[-2:]
    room = {
        "device": hardware.device_bytes,
        "both": hardware.device_bytes + hardware.host_bytes,  # states and activations are in one or the other
    }
    found = float(MOST_LAYERS)
    for name, limit in room.items():
        at, before = (
            need.device_bytes + (need.host_bytes if name == "both" else 0) for need in (known[second], known[first])
        )
        if at > before:
            found = min(found, second + (limit - at) * (second - first) / (at - before))
    return int(max(found, 0))
