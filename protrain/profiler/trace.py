"""The memory-aware trace (paper section 4): one training step of the model, on a GPU, the CPU or the meta device.

Unlike tools that simulate a step, it runs the model's own forward and backward, so it needs no model of autograd or of
the allocator. It needs the device memory of one block only, so it works before there is a plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from protrain.common import batch as batches
from protrain.common.dtypes import default_dtype
from protrain.common.parameters import DTYPES, is_managed, refuse_moves
from protrain.distributed.devices import own_device
from protrain.forward.chunked_loss import is_chunked
from protrain.forward.module_state import SHARED, BlockModules, Contents, RandomState
from protrain.profiler.blocks import (
    checkpointing_switches,
    find_blocks,
    find_units,
    refuse_scripted,
    switch_off_checkpointing,
)
from protrain.profiler.meta_device import KnownIntegers
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord
from protrain.profiler.operations import AttentionCall, measured_ms, storages_in
from protrain.profiler.stand_in_weights import StandInWeights
from protrain.profiler.step_times import (
    ALONE,
    SUSTAINED_MS,
    Segment,
    Together,
    finish,
    median_durations,
    time_steps,
)
from protrain.profiler.traced_step import TracedStep

_SPARE = 0.5  # the share of free device memory in which weights may stay for their next use
_OUT_OF_MEMORY = re.compile("out of memory|ALLOC_FAILED")


def profile(
    model: nn.Module,
    example_batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    show: Callable[[str], None] | None = None,
    device_bytes: int | None = None,
    together: Together = ALONE,
) -> ModelProfile:
    """Trace one training step of ``model`` on ``example_batch``.

    The model comes out bit for bit as it went in: parameters, buffers, random states, training flags and hooks. Its
    parameters may be on any device, including the meta device, and need not fit ``device`` together.

    Args:
        model: any module. It is called as in training, with fp32 inputs cast to ``dtype``.
        example_batch: a mapping or a tuple with the shapes that training will use, on any device.
        optimizer: its groups say which parameters train. Without one, all that require a gradient do.
        device: "cuda", "cpu" or "meta"; the default is CUDA if there is a GPU. On "meta" nothing is computed or timed.
        dtype: the type of the parameters; the default is bfloat16, and float32 on the CPU.
        show: called with a line on what is being done, as a trace may take minutes on a CPU.
        device_bytes: the size of the device. Weights may keep half of it from one use to the next. The default is
            what is free.
        together: what the processes that profile the same model at the same time agree on. Alone, this one decides.

    Raises:
        ValueError: there is no such device, the batch is no mapping or tuple, nothing is trainable, a module is a
            ScriptModule, or the model changes its parameters in place in forward.
    """
    batches.check(example_batch)
    refuse_scripted(model)
    target = torch.device("meta") if str(device) == "meta" else own_device(device)
    dtype = dtype or DTYPES[default_dtype(target.type)]
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype must be torch.bfloat16, torch.float16 or torch.float32, not {dtype}")
    trace = partial(_traced, model, example_batch, optimizer, device=target, dtype=dtype, show=show, together=together)
    spare_bytes = _spare_bytes(target, device_bytes)
    if spare_bytes:
        try:
            return trace(spare_bytes=spare_bytes)
        except RuntimeError as error:  # libraries raise errors of their own when an allocation of theirs fails
            if not _OUT_OF_MEMORY.search(str(error)):
                raise
            together.caught(error)
        torch.cuda.empty_cache()
    return trace(spare_bytes=0)


def _spare_bytes(device: torch.device, device_bytes: int | None) -> int:
    """The bytes in which weights may stay from one use to the next. The rest is for activations."""
    if device.type != "cuda":
        return 0
    free_bytes, _ = torch.cuda.mem_get_info(device)
    free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_SPARE * min(free_bytes, device_bytes or free_bytes))


def _traced(
    model: nn.Module,
    example_batch: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    show: Callable[[str], None] | None,
    spare_bytes: int,
    together: Together,
) -> ModelProfile:
    blocks = find_blocks(model)
    with (
        restored(model, device),
        StandInWeights(model, device, dtype, spare_bytes=spare_bytes) as weights,
    ):
        switch_off_checkpointing(checkpointing_switches(model))
        refuse_moves(model, torch.zeros((), dtype=dtype, device=device))  # until the modules are restored
        rewind = snapshot(model, device)
        # An unmanaged parameter may have become one that looks managed when it moved, but has no stand-in.
        owned = {
            path: tuple(weights.index[id(parameter)] for parameter in parameters if id(parameter) in weights.index)
            for path, parameters in find_units(model, blocks).items()
        }
        modules = {path: BlockModules(model.get_submodule(path), nn.Parameter) for path in blocks}
        parts = (model, owned, modules, weights)
        known = KnownIntegers()
        moved = known.moved if device.type == "meta" else partial(torch.Tensor.to, device=device)

        def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
            """Inputs for one step, as copies that the step may write to."""
            args, kwargs = batches.arguments(batches.move(batches.fresh_copy(example_batch), device, moved))
            return batches.cast_inputs(args, batches.training_arguments(model, kwargs), dtype)

        def tell(what: str, part: str) -> None:
            if show is not None:
                show(f"measuring {what}, {part}")

        step = TracedStep(*parts, measure=True, show=partial(tell, "memory"), known=known)
        step.run(*inputs())
        weights.refuse_writes()
        timed = [[(0.0, 0.0)] * len(step.segments)]
        attention_ms: dict[AttentionCall, float] = {}
        if device.type != "meta":

            def timed_step() -> list[Segment]:
                rewind()
                weights.put_back_buffers()
                show = partial(tell, "times")
                once = TracedStep(*parts, measure=False, show=show)
                once.run(*inputs())
                return once.segments

            finish(device)
            timed = time_steps(
                timed_step,
                device,
                compiled=step.compiled,
                sustained_ms=SUSTAINED_MS if device.type == "cuda" else 0.0,
                together=together,
            )
            calls = {call for use in step.blocks.values() for call in use.operations.saved_attention}
            tell("times", "attention alone")
            attention_ms = {call: measured_ms(call, device) for call in calls}
    if any(len(durations) != len(step.segments) for durations in timed):
        raise ValueError(
            f"two identical steps of {type(model).__name__} called its blocks differently, so it cannot be profiled; "
            "make its forward depend only on its inputs and torch's random state"
        )
    return ModelProfile(
        model=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        batch_shapes=batches.shapes(example_batch),
        tokens=batches.tokens(example_batch),
        chunked_loss=is_chunked(model),
        compiled=step.compiled,
        output_bytes=step.output_bytes,
        buffer_bytes=sum(storages_in(weights.unmanaged_memory()).values()),
        parameters=parameter_records(model, optimizer),
        **_records(step, owned, median_durations(timed), attention_ms),
    )


def _records(
    step: TracedStep,
    owned: dict[str, tuple[int, ...]],
    durations: list[tuple[float, float]],
    attention_ms: dict[AttentionCall, float],
) -> dict[str, Any]:
    """The fields of a profile on the units, calls, blocks and segments of ``step``.

    ``durations`` are the milliseconds of each segment and of the recomputation in it.
    """
    units = _units(step, owned)
    # for each block, the inputs that no other block is given, with their bytes
    given = Counter(key for use in step.blocks.values() for key in use.inputs)
    own = {
        path: {key: size for key, size in use.inputs.items() if given[key] == 1} for path, use in step.blocks.items()
    }
    position = {unit: index for index, unit in enumerate(units)}
    order = {path: index for index, path in enumerate(step.blocks)}
    unit_records = tuple(
        UnitRecord(
            name=unit,
            block=order.get(unit),
            parameters=used,
            within=tuple(sorted(position[outer] for outer in step.within.get(unit, ()) if outer in position)),
        )
        for unit, used in units.items()
    )
    segments = tuple(
        SegmentRecord(
            phase=segment.phase,
            block=None if segment.block is None else order[segment.block],
            live_bytes=segment.live_bytes,
            peak_bytes=segment.peak_bytes,
            duration_ms=duration,
            **_held_inputs(step, segment, own),
        )
        for segment, (duration, _) in zip(step.segments, durations, strict=True)
    )
    return {
        "units": unit_records,
        "calls": tuple(position[unit] for unit in step.calls if unit in position),
        "blocks": _blocks(step, own, durations, attention_ms),
        "segments": segments,
    }


def parameter_records(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[ParameterRecord, ...]:
    """The floating-point parameters of ``model`` in definition order, with their optimizer groups.

    Frozen parameters, and those in no group of ``optimizer``, have the group -1. Without an optimizer there is one
    group.
    """
    groups = optimizer.param_groups if optimizer is not None else [{"params": list(model.parameters())}]
    index = {id(parameter): at for at, group in enumerate(groups) for parameter in group["params"]}
    return tuple(
        ParameterRecord(
            name=name,
            shape=tuple(parameter.shape),
            group=index.get(id(parameter), -1) if parameter.requires_grad else -1,
        )
        for name, parameter in model.named_parameters()
        if is_managed(parameter)
    )


def _units(step: TracedStep, owned: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The parameters that each unit uses. Units come in the order of their first calls, uncalled ones last."""
    known = dict.fromkeys((*step.calls, *owned))
    used = {unit: (*owned.get(unit, ()), *sorted(step.uses.get(unit, ()))) for unit in known}
    return {unit: indexes for unit, indexes in used.items() if indexes}


def _held_inputs(step: TracedStep, segment: Segment, own: dict[str, dict[StorageWeakRef, int]]) -> dict[str, int]:
    """The fields of a segment's record on inputs that code outside the checkpoint holds for a while."""
    sizes = own.get(segment.block or "", {})
    held = {key: end for key, end in segment.held_until.items() if key in sizes and key not in step.kept_until_backward}
    return {"held_bytes": sum(sizes[key] for key in held), "held_until": max(held.values(), default=0)}


def _blocks(
    step: TracedStep,
    own: dict[str, dict[StorageWeakRef, int]],
    durations: list[tuple[float, float]],
    attention_ms: dict[AttentionCall, float],
) -> tuple[BlockRecord, ...]:
    """The records of the blocks. Blocks that are alike get their median times, as any single time may be disturbed."""
    forward = dict.fromkeys(step.blocks, 0.0)
    backward = dict.fromkeys(step.blocks, 0.0)
    recompute = dict.fromkeys(step.blocks, 0.0)
    for segment, (whole, recomputation) in zip(step.segments, durations, strict=True):
        if segment.block is not None and segment.phase == "forward":
            forward[segment.block] += whole
        elif segment.block is not None:
            backward[segment.block] += whole - recomputation
            recompute[segment.block] += recomputation
    kinds: dict[object, list[str]] = {}
    for path, use in step.blocks.items():
        kinds.setdefault((use.operations.flops, use.saved_bytes, use.saved_tensors, use.output_bytes), []).append(path)
    for times in (forward, backward, recompute):
        for alike in kinds.values():
            times |= dict.fromkeys(alike, median(times[path] for path in alike))
    return tuple(
        BlockRecord(
            name=path,
            saved_bytes=use.saved_bytes,
            saved_tensors=use.saved_tensors,
            forward_peak_bytes=use.forward_peak_bytes,
            input_bytes=sum(own[path].values()),
            held_input_bytes=sum(size for key, size in own[path].items() if key in step.kept_until_backward),
            recompute_ms=recompute[path],
            unsaved_input_bytes=min(
                use.saved_bytes,  # otherwise a block would need less memory when it is not recomputed
                use.kept_bytes
                + sum(
                    size for key, size in own[path].items() if key not in use.saved_inputs | step.kept_until_backward
                ),
            ),
            output_bytes=use.output_bytes,
            forward_ms=forward[path],
            backward_ms=backward[path],
            forward_flops=use.operations.flops,
            forward_traffic_bytes=use.operations.fused_bytes if step.compiled else use.operations.traffic_bytes,
            attention_bytes=min(use.saved_bytes, sum(call.output_bytes for call in use.operations.saved_attention)),
            attention_flops=sum(call.flops for call in use.operations.saved_attention),
            attention_ms=sum(attention_ms.get(call, 0.0) for call in use.operations.saved_attention),
            collective=use.operations.collective,
        )
        for path, use in step.blocks.items()
    )


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in training mode inside, and restore modules' attributes and random states afterwards.

    A snapshot to go back to between steps must be taken with the stand-in weights in place. Recurrent modules keep
    lists of their weights, and where those are not the parameters, they flatten them again.

    All that [Note: contents of modules] names is restored. A model may register hooks on itself in its first forward
    and remember in an attribute that it did, as models of transformers do. If only the attribute were restored, the
    next forward would register the hooks again.
    """
    put_back = snapshot(model, device)
    try:
        model.train()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        put_back()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine allocates chunks next, and they need whole segments
            # While it tunes a kernel, the compiler pins copies of what the kernel changes, and torch keeps that memory.
            torch._C._host_emptyCache()


def snapshot(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """A function that puts the modules of ``model`` and the random states back to how they are now."""
    contents = Contents.of(model)
    random_state = RandomState(device, (*contents.generators, *SHARED))

    def put_back() -> None:
        contents.put_back()
        random_state.set()

    return put_back
