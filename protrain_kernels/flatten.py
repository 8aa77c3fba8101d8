"""Many tensors <-> one chunk, in one launch whatever their number.

``flatten`` writes tensors into their places of a chunk. The same pass casts or accumulates, zeroes the padding and sums
squares.

    value = fp32(tensor)
    value = chunk[offset : offset + n] + value          with accumulate (an fp32 chunk)
    chunk[offset : offset + n] = value                  rounded to nearest, ties to even; the tensor's own bits where
                                                        neither a cast nor an addition changes them
    chunk[offset + n : next multiple of 128] = 0
    partials[start : start + tiles(n)] = sums of squares of what the chunk now holds (see sum_of_squares.py)

An fp32 chunk holds sums as they are. Its squares are of the values rounded to the weight's type (see rounding), because
this is the gradient that the update sees.

A tensor that is its own place in the chunk is only summed up. The partials are a finite check too: an infinity or a
NaN in the chunk makes its partial infinite or NaN.

``unflatten`` is the way back: tensor = chunk[offset : offset + n], cast likewise.

Bytes per element: the source is read and the target written (and read with accumulate), which is 4 for bf16 into bf16
and 10 for bf16 accumulated in fp32. A pass of its own for the squares would read the chunk again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protrain_kernels.flatten_kernels import flatten_reference, unflatten_reference
from protrain_kernels.flatten_plan import FlattenPlan
from protrain_kernels.host_kernels import host_flatten
from protrain_kernels.rounding import check_weight_dtype

_MOST_PLANS = 4096
_plans: dict[tuple[object, ...], FlattenPlan] = {}


def flatten(
    tensors: Sequence[torch.Tensor],  # any shapes, bfloat16, float16 or float32
    chunk: torch.Tensor,  # [chunk elements] bfloat16, float16 or float32, written
    offsets: Sequence[int],  # elements into chunk
    partials: torch.Tensor | None = None,  # [partials] float32, written
    partial_offsets: Sequence[int] | None = None,  # elements into partials
    *,
    accumulate: bool = False,
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    """Write tensors into their places of a chunk, with their partial sums of squares, reading each once.

    The first call with given shapes, type and offsets prepares what depends on them alone (``FlattenPlan``).

    Args:
        tensors: contiguous, of one type and device, of any number, shapes and addresses.
        chunk: 1-d. Each tensor's padding up to a multiple of 128 elements is zeroed. Nothing else outside the tensors'
            places is touched.
        offsets: where each tensor starts in the chunk: multiples of 128 elements.
        partials: 1-d float32; tensor i writes tiles(numel) of them, of the values that the chunk holds afterwards.
        partial_offsets: where each tensor's partials start.
        accumulate: add to a float32 chunk rather than overwrite it.
        weight_dtype: the type of the weights whose gradients these are. The values of a float32 chunk are rounded to it
            for the squares, and only for them: so the norm is that of the gradient that the update sees.

    Raises:
        ValueError: a tensor has the wrong type, device or layout, or does not fit at its offset.
    """
    if not tensors:
        return
    if (partials is None) != (partial_offsets is None):
        raise ValueError("partials and partial_offsets come together: pass both or neither")
    if accumulate and chunk.dtype != torch.float32:
        raise ValueError(f"values accumulate in a float32 chunk, not {chunk.dtype}: make the chunk float32")
    check_weight_dtype(weight_dtype)
    plan = plan_for(tensors, offsets, partial_offsets)
    plan.check(chunk, partials)
    if chunk.is_cuda:
        plan.launch_flatten(tensors, chunk, partials, accumulate=accumulate, weight_dtype=weight_dtype)
        return
    if not host_flatten(tensors, plan.rows, chunk, partials, accumulate=accumulate, weight_dtype=weight_dtype):
        where = chunk, plan.offsets, partials, plan.starts
        flatten_reference(tensors, *where, accumulate=accumulate, weight_dtype=weight_dtype)


def unflatten(
    chunk: torch.Tensor,  # [chunk elements] bfloat16, float16 or float32
    tensors: Sequence[torch.Tensor],  # any shapes, bfloat16, float16 or float32, written
    offsets: Sequence[int],  # elements into chunk
) -> None:
    """Write a chunk's pieces back into tensors: the inverse of ``flatten`` without accumulation.

    Args:
        chunk: 1-d; unchanged.
        tensors: contiguous, of one type and device, of any number, shapes and addresses.
        offsets: where each tensor starts in the chunk: multiples of 128 elements.

    Raises:
        ValueError: a tensor has the wrong type, device or layout, or reaches beyond the chunk.
    """
    if not tensors:
        return
    plan = plan_for(tensors, offsets, None)
    plan.check(chunk)
    if chunk.is_cuda:
        plan.launch_unflatten(chunk, tensors)
    else:
        unflatten_reference(chunk, tensors, offsets)


def plan_for(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], partial_offsets: Sequence[int] | None
) -> FlattenPlan:
    """The plan of tensors like these at these offsets, made at the first call with them."""
    key = (
        tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg()) for tensor in tensors]),
        tuple(offsets),
        None if partial_offsets is None else tuple(partial_offsets),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:  # where shapes change on every call, the tables must not pile up for ever
            _plans.clear()
        plan = _plans[key] = FlattenPlan(tensors, offsets, partial_offsets)
    return plan
