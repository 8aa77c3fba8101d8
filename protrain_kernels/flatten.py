"""Many tensors <-> one chunk, in one launch whatever their number.

``flatten`` writes tensors into their places of a chunk: scale, cast or accumulate, zero padding, partial sums of
squares and a finite check in the same pass.

    value = fp32(tensor) * scale                        where a scale is given
    value = chunk[offset : offset + n] + value          with accumulate (an fp32 chunk)
    chunk[offset : offset + n] = value                  rounded to nearest, ties to even; unchanged bits where no scale,
                                                        cast or addition changes them
    chunk[offset + n : next multiple of 128] = 0
    partials[start : start + tiles(n)] = sums of squares of what the chunk now holds (see sum_of_squares)
    nonfinite = 1                                       if the chunk now holds an infinity or NaN there, else unchanged

A partial is finite only where its part of the chunk is, so finite squares are a finite check as well; ``nonfinite``
tells a value that isn't finite from squares that overflow, and stays on the device, for ``adam`` to skip its step by.

``unflatten`` is the way back: tensor = chunk[offset : offset + n] * scale, cast likewise.

Bytes per element: the source read, the target written (and read with accumulate): 4 for bf16 into bf16, 10 for bf16
accumulated in fp32. A pass of its own for the squares would read the chunk again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protrain_kernels.flatten_plan import FlattenPlan, layout_of

_MOST_PLANS = 4096
_plans: dict[tuple[object, ...], FlattenPlan] = {}


def flatten(
    tensors: Sequence[torch.Tensor],  # any shapes and strides, bfloat16, float16 or float32
    chunk: torch.Tensor,  # [chunk elements] bfloat16, float16 or float32, written
    offsets: Sequence[int],  # elements into chunk
    partials: torch.Tensor | None = None,  # [partials] float32, written
    partial_offsets: Sequence[int] | None = None,  # elements into partials
    *,
    accumulate: bool = False,
    scale: torch.Tensor | None = None,  # one float32
    nonfinite: torch.Tensor | None = None,  # one int32, written
    threads: int = 0,
) -> None:
    """Write tensors into their places of a chunk, with their partial sums of squares, reading each once.

    What depends on shapes, strides, types and offsets alone is prepared at the first call with them (``FlattenPlan``).

    Args:
        tensors: of any shape, strides, alignment and number, in row-major order whatever their strides.
        chunk: 1-d. Each tensor's padding up to a multiple of 128 elements is zeroed; nothing else outside the tensors
            is touched.
        offsets: where each tensor starts in the chunk: multiples of 128 elements.
        partials: 1-d float32; tensor i writes tiles(numel) of them, of the values that the chunk holds afterwards.
        partial_offsets: where each tensor's partials start.
        accumulate: add to a float32 chunk rather than overwrite.
        scale: one float32 on the same device that multiplies every value, read by the kernel.
        nonfinite: one int32 on the same device; becomes 1 if a value in the chunk isn't finite afterwards.
        threads: host threads for CPU tensors; 0 is torch.get_num_threads().

    Raises:
        ValueError: a tensor has the wrong type, device or layout, or doesn't fit at its offset.
    """
    if not tensors:
        return
    if (partials is None) != (partial_offsets is None):
        raise ValueError("partials and partial_offsets come together: pass both or neither")
    plan = _plan_for(tensors, offsets, partial_offsets)
    plan.flatten_planned(
        tensors, chunk, partials, accumulate=accumulate, scale=scale, nonfinite=nonfinite, threads=threads
    )


def unflatten(
    chunk: torch.Tensor,  # [chunk elements] bfloat16, float16 or float32
    tensors: Sequence[torch.Tensor],  # any shapes and strides, bfloat16, float16 or float32, written
    offsets: Sequence[int],  # elements into chunk
    *,
    scale: torch.Tensor | None = None,  # one float32
) -> None:
    """Write a chunk's pieces back into tensors: the inverse of ``flatten`` where neither scales nor casts.

    Args:
        chunk: 1-d; unchanged.
        tensors: of any shape, strides without overlap, alignment and number.
        offsets: where each tensor starts in the chunk: multiples of 128 elements.
        scale: one float32 on the same device that multiplies every value, read by the kernel.

    Raises:
        ValueError: a tensor has the wrong type, device or layout, or reaches beyond the chunk.
    """
    if tensors:
        _plan_for(tensors, offsets, None).unflatten_planned(chunk, tensors, scale=scale)


def _plan_for(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], partial_offsets: Sequence[int] | None
) -> FlattenPlan:
    key = (
        tuple([layout_of(tensor) for tensor in tensors]),
        tuple(offsets),
        None if partial_offsets is None else tuple(partial_offsets),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:  # shapes that change on every call: don't hold their tables for ever
            _plans.clear()
        plan = _plans[key] = FlattenPlan(tensors, offsets, partial_offsets)
    return plan
