"""Whether a plan fits the machine: plans that the caller gives, and errors for plans that do not fit.

Every error says why the plan does not fit, and names the smallest change that makes one fit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from protrain.common.errors import PlanError
from protrain.common.tables import format_bytes, per_gpu
from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import pack
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import (
    BlockMode,
    Counts,
    Modes,
    Plan,
    block_modes,
    refuse_other_model,
    refuse_other_world_size,
)
from protrain.planning.predict import Models
from protrain.planning.ranges import check_counts
from protrain.planning.segments import Bytes
from protrain.profiler.model_profile import ModelProfile


def evaluate(
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    n_persist: int,
    n_buffer: int,
    n_swap: int,
    n_ckpt: int,
    n_ckpt_swap: int = 0,
    n_speculate: int = 0,
    n_weight_only: int = 0,
    n_device_sum: int = 0,
    stream: bool | None = None,
    keep_attention: bool = False,
    chunk_elements: int | None = None,
) -> Plan:
    """Make a plan by hand: the plan of these integers, with its predictions.

    ``stream`` says whether the GPU may update chunks in host memory. By default it may if calibration knows how fast.

    Raises:
        ValueError: a count is out of range; the message says the range.
        PlanError: the plan does not fit ``hardware``.
    """
    layout = pack(profile, chunk_elements, hardware.world_size)
    planned = profile.keeping_attention() if keep_attention else profile
    models = Models(MemoryModel(planned, hardware, layout, stream=stream))
    counts = Counts(n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_weight_only, n_device_sum)
    check_counts(counts, models)
    plan = models.plan(counts)
    _check_fits(models, plan)
    return plan


def check(plan: Plan, profile: ModelProfile, hardware: HardwareProfile) -> Plan:
    """``plan``, from a file for instance, with new predictions for ``profile`` and ``hardware``.

    Raises:
        ValueError: the plan was made for another model, optimizer grouping or number of ranks, or contradicts itself.
        PlanError: the plan does not fit ``hardware`` with the batch of ``profile``.
    """
    refuse_other_model(plan, profile)
    refuse_other_world_size(plan, hardware.world_size)
    models = Models.of(plan, profile, hardware)
    if plan.n_chunks != len(models.layout.chunks):
        raise ValueError(f"the plan says n_chunks={plan.n_chunks}, but the model has {len(models.layout.chunks)}")
    n_swap, n_offload = (plan.block_modes.count(kind) for kind in (BlockMode.SWAP, BlockMode.CKPT_SWAP))
    n_ckpt = sum(mode.recomputes for mode in plan.block_modes)
    modes = (plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
    if len(plan.block_modes) != len(profile.blocks) or (n_swap, n_ckpt, n_offload) != modes:
        raise ValueError(
            f"the plan's block_modes name {len(plan.block_modes)} blocks, {n_swap} swapped and {n_ckpt} checkpointed, "
            f"{n_offload} of these with offloaded inputs; the model has {len(profile.blocks)} blocks and the plan says "
            f"n_swap={plan.n_swap}, n_ckpt={plan.n_ckpt}, n_ckpt_swap={plan.n_ckpt_swap}"
        )
    check_counts(plan.counts, models)
    fresh = models.plan(plan.counts, plan.block_modes)
    _check_fits(models, fresh)
    return fresh


def _check_fits(models: Models, plan: Plan) -> None:
    """Raise PlanError if ``plan`` needs more memory than there is."""
    hardware = models.hardware
    if plan.device_bytes > hardware.device_bytes or plan.host_bytes > hardware.host_bytes:
        raise _does_not_fit(models.memory, plan.counts, plan.block_modes, given=True)


_SEARCH = "leave the plan out, and one is searched"


def _does_not_fit(
    memory: MemoryModel, counts: Counts, modes: Modes, *, given: bool, fitting_device_bytes: int = 0
) -> PlanError:
    """The PlanError of a plan of ``counts`` and ``modes``, which needs more device or host memory than there is.

    Args:
        memory: the memory model.
        counts: the integers of the plan.
        modes: its block modes.
        given: whether the caller gave the plan, so that another plan may fit.
        fitting_device_bytes: the device memory with which a plan fits; 0 if it is not known or none does.
    """
    hardware = memory.hardware
    device, host = memory.device_bytes(counts, modes), memory.host_bytes(counts, modes)
    remedies, smaller, shared = [_SEARCH] if given else [], 0, ""
    if device > hardware.device_bytes:
        where, needed, available = "GPU" if hardware.device_type == "cuda" else "device", device, hardware.device_bytes
        parts = memory.device_parts(counts, modes)
        other = per_gpu("Host memory", hardware.world_size), host, hardware.host_bytes
        batch = memory.profile.n_sequences
        if not given and host <= hardware.host_bytes:
            static = memory.static_bytes(counts.n_persist, counts.n_buffer, counts.n_device_sum)
            share = (available - static) / max(1, needed - static)  # of the activations that there is room for
            smaller = max(0, min(batch - 1, int(batch * share)))
        if smaller:
            remedies.append(f"a batch of {smaller} instead of {batch} fits")
        both = f" with {_host_memory(memory, host)}" if host > hardware.host_bytes else ""
        remedies.append(f"device_memory of at least {_at_least(needed)}{both} fits {'it' if given else 'this batch'}")
    else:
        where, needed, available = "host", host, hardware.host_bytes
        parts, other = memory.host_parts(counts, modes), ("Device memory", device, hardware.device_bytes)
        remedies.append(f"{_host_memory(memory, needed)} fits{' it' if given else ''}")
        if fitting_device_bytes:
            enough = _at_least(fitting_device_bytes)
            remedies.append(f"so does about {enough} of device_memory, with more of the model states there")
        if hardware.world_size > 1:
            shared = f"This is for one of {hardware.world_size} ranks, with its share. "
    narrow = replace(memory.profile, moment_dtype="bfloat16")
    if not given and some_plan_fits(MemoryModel(narrow, hardware, memory.layout)):
        remedies.append("so does moment_dtype=bfloat16, with Adam's moments in 16 bits")
    largest = max(list(parts)[:-1], key=parts.__getitem__)  # the last is the margin, which nobody can change
    return PlanError(
        where=where,
        needed_bytes=needed,
        available_bytes=available,
        largest_part=f"{largest} ({format_bytes(parts[largest])})",
        remedy=f"{shared}To fit: {'; '.join(remedies)}. {other[0]}: needed {format_bytes(other[1])}, "
        f"available {format_bytes(other[2])}.",
        given=given,
        fitting_batch=smaller,
    )


def least_bytes(memory: MemoryModel) -> tuple[Bytes, Bytes]:
    """Device and host bytes of the plans that need the least memory, both as [n_persist, n_ckpt_swap].

    These plans recompute every block, since any other mode of a block adds to what the trace measured with all of them
    checkpointed. They have the fewest chunk buffers.
    """
    placements = range(len(memory.layout.chunks) + 1)
    static = np.array([memory.static_bytes(n, memory.least_buffers[n]) for n in placements])
    host = np.array([memory.least_host_bytes(n, 0) for n in placements])
    margined_bytes, swapped_bytes = memory.offloads(0, len(memory.profile.blocks))
    return static[:, None] + margined_bytes, host[:, None] + swapped_bytes


def some_plan_fits(memory: MemoryModel) -> bool:
    """Whether any plan fits both memories."""
    device_bytes, host_bytes = least_bytes(memory)
    hardware = memory.hardware
    return bool(((device_bytes <= hardware.device_bytes) & (host_bytes <= hardware.host_bytes)).any())


def nothing_fits(memory: MemoryModel) -> PlanError:
    """Why no plan fits: the device cannot hold the smallest, or the host cannot hold what the device does not."""
    device_bytes, host_bytes = least_bytes(memory)
    fits = device_bytes <= memory.hardware.device_bytes
    needed = np.where(fits, host_bytes, host_bytes.max() + 1) if fits.any() else device_bytes
    n_persist, n_ckpt_swap = divmod(int(needed.argmin()), needed.shape[1])
    n_blocks = len(memory.profile.blocks)
    counts = Counts(n_persist, memory.least_buffers[n_persist], 0, n_blocks, n_ckpt_swap)
    enough = device_bytes[host_bytes <= memory.hardware.host_bytes]
    modes, fitting_device_bytes = block_modes(n_blocks, 0, n_blocks, n_ckpt_swap), int(min(enough, default=0))
    return _does_not_fit(memory, counts, modes, given=False, fitting_device_bytes=fitting_device_bytes)


def _host_memory(memory: MemoryModel, needed_bytes: int) -> str:
    """What to ask of host_memory, which all ranks of a machine share, if each of them needs ``needed_bytes``."""
    shares = "" if memory.layout.world_size == 1 else " for each GPU of the machine"
    return f"host_memory of at least {_at_least(needed_bytes)}{shares}"


def _at_least(size_bytes: int) -> str:
    """``size_bytes`` as text that parses to no less."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes >= size:
            return f"{-(-size_bytes * 100 // size) / 100:.2f}{unit}"
    return f"{size_bytes}"
