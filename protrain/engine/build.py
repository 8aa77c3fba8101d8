"""From a Plan to a running engine: memory is taken here, in this order, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain.common.parameters import moved, unmanaged_memory
from protrain.common.quantities import format_bytes
from protrain.engine.activations.ledger import Ledger, SimulatedLedger
from protrain.engine.activations.swap import ALIGNMENT_BYTES, HostSlots
from protrain.engine.engine import Engine
from protrain.engine.gradients.gradients import Gradients
from protrain.engine.hooks import install
from protrain.engine.states.arena import Arena, aligned
from protrain.engine.states.chunks import DTYPES, complete_chunks, held_states, make_chunks, make_members, size_bytes
from protrain.engine.states.materialise import fill
from protrain.engine.streams import streams_for
from protrain.engine.units import make_units
from protrain.engine.updates.streamer import Streamer
from protrain.engine.updates.worker import HostWorker
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.state_hooks import StateHooks
from protrain.planning.layout import most_held, streamed_chunks, updated_chunks
from protrain.planning.plan import BlockMode, Plan, as_planned, layout_of, moved_input_bytes
from protrain.planning.schedule import Schedule
from protrain.profiler.model_profile import ModelProfile
from protrain_kernels.host_library import library


def debugging() -> bool:
    """Whether released memory is poisoned with NaN (environment variable PROTRAIN_DEBUG=1)."""
    return os.environ.get("PROTRAIN_DEBUG", "") not in ("", "0")


def build_engine(
    model: nn.Module,
    profile: ModelProfile,
    plan: Plan,
    *,
    device: torch.device,
    device_bytes: int,
    host_bytes: int,
    host_threads: int,
    streaming_bytes: int,
    weights: str | Path | None,
    show: Callable[[str, float], None],
) -> tuple[Engine, int]:
    """Take the memory that ``plan`` needs, move the model's states there, and hook the engine into the model.

    Args:
        model: to train; where its parameters lie is no longer its own after this.
        profile: of the model.
        plan: what to do.
        device: to train on.
        device_bytes: that may be taken of it.
        host_bytes: that may be taken of the host's memory.
        host_threads: of a kernel on the host.
        streaming_bytes: device memory that states pass through where the device updates chunks in host memory; 0: none
            is needed there.
        weights: a folder of safetensors to load.
        show: called with what is being done and how much is done, from 0 to 1.

    Returns:
        The engine, and the bytes that lie on the device for good.
    """
    library()  # built now, and a missing compiler is said now, not in the middle of the first step
    dtype = DTYPES[profile.dtype]
    layout = layout_of(profile, plan)
    streams = streams_for(device)
    arena = Arena(device)
    first = plan.n_persist + plan.n_speculate
    candidates = [index for index in updated_chunks(profile, layout) if index >= first]
    streamed = streamed_chunks(candidates, plan.n_stream)
    show(f"{format_bytes(plan.host_bytes)} of host memory", 0.0)
    chunks = make_chunks(layout, plan, dtype, device, arena, streams, streamed=streamed)
    named = dict(model.named_parameters())
    parameters = [named[record.name] for record in profile.parameters]
    members = make_members(profile, layout, chunks, parameters)
    fill(members, model, weights=weights, device=device, show=show)
    _move_the_rest(model, {id(parameter) for parameter in parameters}, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what initialising took
    complete_chunks(chunks, layout, plan, dtype, device)
    buffers = BufferPool(
        n_buffers=(plan.n_buffer, most_held(profile, layout)[plan.n_persist][1]),
        buffer_elements=layout.buffer_elements(plan.n_persist),
        dtype=dtype,
        device=device,
        streams=streams,
        poison=debugging(),
    )
    worker = HostWorker(threads=host_threads)
    streamer = Streamer(streams, staging_bytes=streaming_bytes) if streamed else None
    stream_worker = HostWorker(threads=1, name="protrain-stream-worker") if streamed else None
    spare_device_bytes = device_bytes - plan.device_bytes
    gradients = Gradients(
        members=members,
        device=device,
        dtype=dtype,
        staging_elements=layout.gradient_elements(plan.n_persist),
        streams=streams,
        worker=worker,
        arena=arena,
        spare_device_bytes=spare_device_bytes,
        host_bytes=host_bytes,
        region_elements=layout.region_elements(plan.n_persist),
        n_device_regions=plan.n_device_gradient,
        n_host_regions=plan.n_host_gradient,
        poison=debugging(),
    )
    units = make_units(model, profile, plan, layout, chunks, members)
    persistent = layout.chunks[: plan.n_persist]
    fixed_bytes = (
        profile.buffer_bytes
        + sum(sum(size_bytes(record, held_states(record, layout, plan, dtype))) for record in persistent)
        + sum(buffer.memory.nbytes for buffer in buffers.buffers)
        + gradients.device_bytes
        + (streamer.staging_bytes if streamer is not None else 0)
    )
    ledger = Ledger()
    if device.type != "cuda":
        ledger = SimulatedLedger(
            budget_bytes=device_bytes,
            fixed_bytes=fixed_bytes + plan.transient_bytes,
            fixed=unmanaged_memory(model),
        )
    swapped = sum(
        block.saved_bytes + ALIGNMENT_BYTES * block.saved_tensors
        for block, mode in zip(profile.blocks, plan.block_modes, strict=True)
        if mode is BlockMode.SWAP
    )
    swapped += sum(
        moved_input_bytes(block)
        for block, mode in zip(as_planned(profile, plan).blocks, plan.block_modes, strict=True)
        if mode is BlockMode.CKPT_SWAP
    )
    # A page more for each call, whose region is whole pages, and one for the optimizer: a region that did not fit what
    # is left would be mapped anew.
    arena.reserve(swapped + aligned(1) * (len(profile.calls) + 1))
    backwards = list(reversed(profile.calls))
    fetched = [[chunk for chunk in unit if not chunks[chunk].persistent] for unit in layout.unit_chunks]
    engine = Engine(
        model=model,
        profile=profile,
        plan=plan,
        device=device,
        dtype=dtype,
        streams=streams,
        arena=arena,
        worker=worker,
        streamer=streamer,
        stream_worker=stream_worker,
        chunks=chunks,
        members=members,
        units=units,
        buffers=buffers,
        gradients=gradients,
        swap_slots=HostSlots(arena, streams, limit_bytes=max(host_bytes, arena.total_bytes)),
        ledger=ledger,
        training_order=Schedule([*profile.calls, *backwards], fetched),
        inference_order=Schedule(profile.calls, fetched),
    )
    install(engine)
    StateHooks(engine)
    return engine, fixed_bytes


def _move_the_rest(model: nn.Module, managed: set[int], device: torch.device) -> None:
    """Buffers and parameters that are not managed go to the device for good, in their own dtype and class."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"buffer {name} is on the meta device, and only the model's constructor knows its values: build the "
                "model under `with protrain.empty_parameters():`, which keeps buffers"
            )
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id of the first
    for module in model.modules():
        for name, held in module._buffers.items():
            if held is not None:
                module._buffers[name] = held.to(device)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in managed or parameter.device == device:
                continue
            if id(parameter) not in replaced:
                replaced[id(parameter)] = parameter, _on_device(parameter, device)
            module._parameters[name] = replaced[id(parameter)][1]


def _on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """``parameter`` itself with its data on ``device``, or another where its class cannot take other data."""
    new = moved(parameter, device)
    if is_traceable_wrapper_subclass(parameter) or not torch._has_compatible_shallow_copy_type(parameter, new):
        return new
    parameter.data = new.data
    vars(parameter).update(vars(new))
    return parameter
