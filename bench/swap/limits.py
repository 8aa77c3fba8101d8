"""The best plan with swapped blocks against the best without, where device memory is limited."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from bench.swap.training import TINY, WARM_UP, Case, Measured, Training, profiled
from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.hardware.detection import detect
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan, search
from protrain.profiler.model_profile import ModelProfile

GIB = 1024**3
_HOST_MEMORY = "72GiB"  # of a limited plan: to pin more takes most of the time

# The wider a block, the more it computes for every byte that it saves, and OPT's blocks save least: those of its 66 B
# and 175 B models compute nearly as long as an H100's link takes for what they save.
LIMITS = tuple(
    Case(family="opt", hidden=hidden, layers=layers, batch=32, limits=tuple(n * GIB for n in range(28, 72, 4)))
    for hidden, layers in ((9216, 3), (12288, 2))
)
TINY_LIMITED = replace(TINY, limits=tuple(n * 1024**2 for n in range(6, 20, 2)))


@dataclass(frozen=True, kw_only=True)
class LimitRow(Record):
    """The best plan with swapped blocks and the best without, under one limit."""

    case: Case
    limit_bytes: int
    with_swaps: Measured
    without: Measured


def promising(case: Case, profile: ModelProfile, hardware: HardwareProfile) -> tuple[int, Plan, Plan]:
    """The limit at which swapping is predicted to gain most, and the best plans with it and without."""
    found = []
    for limit in case.limits:
        limited = replace(hardware, device_bytes=limit)
        with suppress(PlanError):  # nothing fits
            best = search(profile, limited)
            if best.n_swap:
                without = search(profile, limited, without=("n_swap",))
                found.append((without.step_ms / best.step_ms, limit, best, without))
    if not found:
        raise SystemExit(f"{case.name}: the best plan swaps nothing under any of its limits")
    return max(found, key=lambda one: one[0])[1:]


def measure_limits(case: Case, device: torch.device, *, steps: int) -> LimitRow:
    """Both plans, one after the other: each may need most of the host's memory."""
    host_memory = _HOST_MEMORY if device.type == "cuda" else "1GiB"
    profile, hardware = profiled(case, device), detect(device, host_memory=host_memory)
    limit, *plans = promising(case, profile, hardware)
    measured = []
    for plan in plans:
        training = Training(case, plan, device, device_memory=limit, host_memory=host_memory)
        training.run(steps, untimed=WARM_UP)
        measured.append(Measured.of(training))
        del training
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return LimitRow(case=case, limit_bytes=limit, with_swaps=measured[0], without=measured[1])
