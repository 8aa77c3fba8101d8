"""The best plan with swapped blocks against the best without, where device memory is limited."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bench.swap.training import TINY, WARM_UP, Case, Measured, Training, profiled
from protrain.common.records import Record
from protrain.hardware import HardwareProfile, detect
from protrain.planning import (
    MemoryModel,
    Plan,
    RuntimeModel,
    block_modes,
    choose_chunk_elements,
    evaluate,
    pack,
    search,
)
from protrain.profiler import ModelProfile

GIB = 1024**3
_HOST_MEMORY = "72GiB"  # of a limited plan: to pin more takes most of the time

# The wider a block, the more it computes for every byte that it saves, and OPT's blocks save least: those of its 66 B
# and 175 B models compute nearly as long as an H100's link takes for what they save.
LIMITS = tuple(
    Case(family="opt", hidden=hidden, layers=layers, batch=32, limits=tuple(n * GIB for n in range(24, 74, 2)))
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
    searched: Plan  # what wrapping would choose


def best_plan(profile: ModelProfile, hardware: HardwareProfile, *, swaps: bool) -> Plan | None:
    """The fastest plan with swapped blocks, or without, by trying all; None where none fits."""
    n_blocks, found = len(profile.blocks), []
    for keep_attention in (False, True):
        kept = profile.keeping_attention() if keep_attention else profile
        memory = MemoryModel(kept, hardware, pack(kept, choose_chunk_elements(kept)))
        runtime = RuntimeModel(memory)
        kinds = (runtime, memory), (runtime.making_weights(), memory.making_weights())
        for n_swap in range(1, n_blocks + 1) if swaps else (0,):
            for n_ckpt in range(n_blocks - n_swap + 1):
                for n_moved in {0, n_ckpt // 2, n_ckpt}:
                    of_blocks = n_blocks, n_swap, n_ckpt, n_moved
                    keeps = {"keep_attention": keep_attention and n_ckpt > 0}
                    for kind in kinds:
                        found += [(step_ms, counts | keeps) for counts, step_ms in _placements(*kind, of_blocks)]
    if not found:
        return None
    _, counts = min(found, key=lambda one: one[0])
    return evaluate(profile, hardware, **counts)


def _placements(
    runtime: RuntimeModel, memory: MemoryModel, of_blocks: tuple[int, int, int, int]
) -> list[tuple[dict[str, Any], float]]:
    """What fits beside blocks treated so, with the step time of each."""
    modes, found = block_modes(*of_blocks), []
    blocks = dict(zip(("n_swap", "n_ckpt", "n_ckpt_swap"), of_blocks[1:], strict=True))
    activations = memory.activations(modes)
    margined, swapped = np.array(memory.margined_bytes(activations)), np.array(activations.swapped_bytes)
    for n_persist in range(len(memory.layout.chunks) + 1):
        n_buffer = int(memory.most_buffers(n_persist, margined))
        if n_buffer < memory.least_buffers(n_persist):
            continue
        if memory.host_bytes_beside(n_persist, activations.swapped_bytes) > memory.hardware.host_bytes:
            continue
        most_early = int(memory.most_early(n_persist, swapped)) if runtime.speculates else 0
        step_ms, n_speculate = runtime.fitted_ms(modes, n_persist, n_buffer, most_early)
        early = {"n_speculate": n_speculate, "early_weights": memory.early_weights and n_speculate > 0}
        found.append(({"n_persist": n_persist, "n_buffer": n_buffer, **blocks, **early}, step_ms))
    return found


def promising(case: Case, profile: ModelProfile, hardware: HardwareProfile) -> tuple[int, Plan, Plan]:
    """The limit at which swapping is predicted to gain most, and the best plans with it and without."""
    found = []
    for limit in case.limits:
        limited = replace(hardware, device_bytes=limit)
        swapping, without = (best_plan(profile, limited, swaps=swaps) for swaps in (True, False))
        if swapping is not None and without is not None:
            found.append((without.step_ms / swapping.step_ms, limit, swapping, without))
    if not found:
        raise SystemExit(f"{case.name}: nothing fits under any of its limits")
    return max(found, key=lambda one: one[0])[1:]


def measure_limits(case: Case, device: torch.device, *, steps: int) -> LimitRow:
    """Both plans, one after the other: each may need most of the host's memory."""
    host_memory = _HOST_MEMORY if device.type == "cuda" else "1GiB"
    profile, hardware = profiled(case, device), detect(device, host_memory=host_memory)
    limit, *plans = promising(case, profile, hardware)
    measured = []
    for plan in plans:
        training = Training(case, plan, device, device_memory=limit, host_memory=host_memory)
        training.run(WARM_UP, timed=False)
        training.run(steps)
        measured.append(Measured.of(training))
        del training
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    searched = search(profile, replace(hardware, device_bytes=limit))
    return LimitRow(case=case, limit_bytes=limit, with_swaps=measured[0], without=measured[1], searched=searched)
