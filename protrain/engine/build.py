"""From a Plan to a running engine. All memory that the engine keeps is allocated here, in this order."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain.common.parameters import DTYPES, is_managed, moved, unmanaged_memory
from protrain.common.tables import format_bytes
from protrain.distributed.ranks import Ranks
from protrain.engine.engine import Engine
from protrain.engine.gradients.gradients import Gradients
from protrain.engine.hooks import install
from protrain.engine.states.arena import (
    ActivationBytes,
    Arena,
    EngineMemory,
    HostSlots,
    complete_chunks,
    make_chunks,
    make_members,
    planned_states,
    state_sizes_bytes,
    whole_pages,
)
from protrain.engine.states.groups import Groups
from protrain.engine.states.materialise import fill
from protrain.engine.states.weight_files import WeightSources
from protrain.engine.streams import streams_for
from protrain.engine.units import ManagedModel
from protrain.engine.updates.host_updates import Streamer
from protrain.engine.updates.updates import Updates
from protrain.engine.updates.worker import HostWorker
from protrain.engine.weights.bindings import Bindings
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.state_hooks import StateHooks
from protrain.engine.weights.views import Ledger, SimulatedLedger
from protrain.planning.plan import BlockMode, Plan, as_planned, layout_of, offloaded_input_bytes, swapped_block_bytes
from protrain.planning.schedule import most_held
from protrain.planning.sharing import Sharing
from protrain.profiler.model_profile import ModelProfile
from protrain_kernels.host_library import library


def build_engine(
    model: nn.Module,
    profile: ModelProfile,
    plan: Plan,
    *,
    ranks: Ranks,
    gradient_reduction: str,
    device: torch.device,
    device_bytes: int,
    activations: ActivationBytes,
    host_bytes: int,
    host_threads: int,
    sharing: Sharing,
    groups: Groups,
    weights: WeightSources | None,
    show: Callable[[str, float], None],
) -> Engine:
    """Allocate the memory that ``plan`` needs, move the model's states there, and hook the engine into the model.

    Args:
        model: the model to train. From now on the engine decides where its parameters lie.
        profile: of the model.
        plan: what to do.
        ranks: the processes that train together.
        gradient_reduction: "mean" or "sum" of the gradients of all ranks.
        device: the device to train on.
        device_bytes: the limit of device memory.
        activations: what ``plan`` counts of it for forward and backward.
        host_bytes: the limit of host memory.
        host_threads: number of threads of a kernel on the host.
        sharing: when updates are needed, and how fast host and device are at them.
        groups: the hyperparameters.
        weights: what to load.
        show: called with a text that says what is being done, and the share that is done, from 0 to 1.
    """
    groups.refuse_changed(model)
    library()  # build it now, so that a missing compiler is an error before the first step
    dtype = DTYPES[profile.dtype]
    layout = layout_of(profile, plan)
    memory = EngineMemory(
        device=device,
        dtype=dtype,
        streams=streams_for(device),
        arena=Arena(device),
        ranks=ranks,
        free_device_bytes=device_bytes - plan.device_bytes,
        activations=activations,
        host_bytes=host_bytes,
        sum_factor=1.0 / ranks.size if gradient_reduction == "mean" else 1.0,
        poison=os.environ.get("PROTRAIN_DEBUG", "") not in ("", "0"),
    )
    ranks.received_bytes = ranks.sent_bytes = 0  # what was timed before is no part of the training
    show(f"{format_bytes(plan.host_bytes)} of host memory", 0.0)
    chunks = make_chunks(layout, plan, memory)
    members = make_members(profile, layout, chunks, dict(model.named_parameters()))
    fill(members, model, weights=weights, device=device, show=show)
    _move_the_rest(model, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that initialising took
    complete_chunks(chunks, layout, plan, memory)
    for chunk in chunks:  # an upload of a shard on the device waits until its values are written
        memory.streams.compute.record_event(chunk.updated)
    buffers = BufferPool(
        memory,
        resident=[chunk for chunk in chunks if chunk.resident],
        n_buffers=(plan.n_buffer, most_held(profile, layout)[plan.n_persist][1]),  # usual, and large
        buffer_elements=layout.buffer_elements(plan.n_persist),
    )
    managed = ManagedModel(
        model=model,
        profile=profile,
        plan=plan,
        layout=layout,
        memory=memory,
        chunks=chunks,
        members=members,
    )
    gradients = Gradients(managed)
    streamer = _streamer(managed, sharing)
    staging_bytes = 0 if streamer is None else sharing.staging_bytes
    ledger = _ledger(managed, buffers, budget_bytes=device_bytes, staging_bytes=staging_bytes)
    memory.arena.reserve(_activation_bytes(profile, plan))
    updates = Updates(
        managed,
        groups=groups,
        gradients=gradients,
        buffers=buffers,
        worker=HostWorker(threads=host_threads, device=device),
        streamer=streamer,
        committer=HostWorker(threads=1, device=device, name="protrain-committer"),
        inside=profile.step_during_backward,
    )
    engine = Engine(
        managed,
        groups=groups,
        gradients=gradients,
        updates=updates,
        buffers=buffers,
        bindings=Bindings(managed, buffers),
        swap_slots=HostSlots(memory.arena, memory.streams, limit_bytes=max(host_bytes, memory.arena.total_bytes)),
        ledger=ledger,
    )
    install(engine)
    engine.state_hooks = StateHooks(engine)
    return engine


def _streamer(managed: ManagedModel, sharing: Sharing) -> Streamer | None:
    """What updates chunks in host memory on the device, if the plan lets it and there are any."""
    memory = managed.memory
    idle = all(chunk.persistent for chunk in managed.chunks if chunk.trainable)
    if idle or not managed.plan.stream or not memory.arena.all_pinned:  # a kernel reads pinned memory alone
        return None
    return Streamer(memory.streams, sharing, HostWorker(threads=1, device=memory.device, name="protrain-stream-worker"))


def _ledger(managed: ManagedModel, buffers: BufferPool, *, budget_bytes: int, staging_bytes: int) -> Ledger:
    """On a CPU a ledger that refuses activations beyond ``budget_bytes``, as the allocator of a GPU does."""
    profile, plan, layout, memory = managed.profile, managed.plan, managed.layout, managed.memory
    if memory.device.type == "cuda":
        return Ledger()
    states_bytes = (
        state_sizes_bytes(layout.shard_elements(record), planned_states(record, layout, plan, memory.dtype))
        for record in layout.chunks[: plan.n_persist]
    )
    kept_bytes = sum(map(sum, states_bytes)) + sum(buffer.memory.nbytes for buffer in buffers.buffers)
    return SimulatedLedger(
        budget_bytes=budget_bytes,
        fixed_bytes=profile.buffer_bytes + plan.transient_bytes + kept_bytes + memory.zeros_bytes + staging_bytes,
        fixed=unmanaged_memory(managed.model),
    )


def _activation_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Host memory for the activations that one step swaps, and for the inputs that it offloads."""
    swapped = sum(
        swapped_block_bytes(block)
        for block, mode in zip(profile.blocks, plan.block_modes, strict=True)
        if mode is BlockMode.SWAP
    )
    inputs = sum(
        offloaded_input_bytes(block)
        for block, mode in zip(as_planned(profile, plan).blocks, plan.block_modes, strict=True)
        if mode is BlockMode.CKPT_SWAP
    )
    # A region is whole pages, so each call may need a page more. One page is for the optimizer.
    return swapped + inputs + whole_pages(1) * (len(profile.calls) + 1)


def _move_the_rest(model: nn.Module, device: torch.device) -> None:
    """Move buffers, and parameters that are not managed, to the device. Their dtype and class do not change."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} is on the meta device, and only the model's constructor knows its values: build the "
                "model under `with protrain.empty_parameters():`, which keeps buffers that follow from no parameter"
            )
    others = (parameter for parameter in model.parameters() if not is_managed(parameter))
    there = {id(parameter): _on_device(parameter, device) for parameter in others if parameter.device != device}
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = tensor.to(device)
        for name, parameter in module._parameters.items():
            module._parameters[name] = there.get(id(parameter), parameter)


def _on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """``parameter`` with its data on ``device``, or a new one on ``device`` if its class does not let data change."""
    new = moved(parameter, device)
    if is_traceable_wrapper_subclass(parameter) or not torch._has_compatible_shallow_copy_type(parameter, new):
        return new
    parameter.data = new.data
    vars(parameter).update(vars(new))
    return parameter
