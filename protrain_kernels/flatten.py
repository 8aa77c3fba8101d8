"""Many tensors <-> one chunk, in one launch whatever their number.

``flatten`` writes tensors into their places of a chunk. The same pass casts or accumulates, zeroes the padding and sums
squares.

    value = fp32(tensor)
    value = chunk[offset : offset + n] + value          with accumulate (an fp32 chunk)
    chunk[offset : offset + n] = value                  rounded to nearest, ties to even; the tensor's own bits where
                                                        neither a cast nor an addition changes them
    chunk[offset + n : next multiple of 128] = 0
    partials[start : start + tiles(n)] = sums of squares of what the chunk now holds (see rounding.py)

An fp32 chunk holds sums as they are. Its squares are of the values rounded to the weight's type (see rounding), because
this is the gradient that the update sees.

A tensor that is its own place in the chunk is only summed up. The partials are a finite check too: an infinity or a
NaN in the chunk makes its partial infinite or NaN.

``unflatten`` is the way back: tensor = chunk[offset : offset + n], cast likewise.

Bytes per element: the source is read and the target written (and read with accumulate), which is 4 for bf16 into bf16
and 10 for bf16 accumulated in fp32. A pass of its own for the squares would read the chunk again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from protrain_kernels.checks import FLOATS, TILE_CONSTANTS, TILE_OPTIONS, check_aligned, check_memory, check_vector
from protrain_kernels.flatten_kernels import flatten_kernel, flatten_reference, unflatten_kernel, unflatten_reference
from protrain_kernels.host_kernels import sum_of_squares
from protrain_kernels.launch import launch, put_addresses
from protrain_kernels.rounding import FP32, TYPE_CODES
from protrain_kernels.slices import RowTable, Slice

_Kind = tuple[torch.Size, torch.dtype, torch.device, bool, bool]  # and whether a tensor is contiguous, and negated


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

    The first call with given shapes, type and offsets prepares what depends on them alone (``RowTable``).

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
    if weight_dtype not in TYPE_CODES:
        raise ValueError(f"weight_dtype must be one of {', '.join(map(str, TYPE_CODES))}, not {weight_dtype}")
    table = table_for(tensors, offsets, partial_offsets)
    _check(table, chunk, partials)
    how: dict[str, Any] = {"accumulate": accumulate, "weight_dtype": weight_dtype}
    if chunk.is_cuda:
        launch_flatten(table, tensors, chunk, partials, **how)
    else:
        flatten_reference(tensors, chunk, offsets, partials, partial_offsets, **how, squares=sum_of_squares)


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
    table = table_for(tensors, offsets, None)
    _check(table, chunk, None)
    if chunk.is_cuda:
        launch_unflatten(table, chunk, tensors)
    else:
        unflatten_reference(chunk, tensors, offsets)


def table_for(
    tensors: Sequence[torch.Tensor], offsets: Sequence[int], partial_offsets: Sequence[int] | None
) -> RowTable:
    """The row table of tensors like these at these offsets, made and checked at the first call with them."""
    kinds = tuple([(t.shape, t.dtype, t.device, t.is_contiguous(), t.is_neg()) for t in tensors])
    return _table_of(kinds, tuple(offsets), None if partial_offsets is None else tuple(partial_offsets))


@functools.lru_cache(maxsize=4096)  # a limit, as shapes might change on every call
def _table_of(kinds: tuple[_Kind, ...], offsets: tuple[int, ...], partial_offsets: tuple[int, ...] | None) -> RowTable:
    starts = (0,) * len(kinds) if partial_offsets is None else partial_offsets
    if not len(kinds) == len(offsets) == len(starts):
        raise ValueError(
            f"{len(kinds)} tensors need as many offsets and partial_offsets, not {len(offsets)} and {len(starts)}"
        )
    (_, first_dtype, first_device, *_), slices = kinds[0], []
    for index, (kind, offset, start) in enumerate(zip(kinds, offsets, starts, strict=True)):
        shape, dtype, device, is_contiguous, is_neg = kind
        name, numel = f"tensors[{index}]", shape.numel()
        if device != first_device:
            raise ValueError(f"{name} is on {device}, tensors[0] on {first_device}: move it there")
        check_memory(name, device=device, negates=is_neg)
        if dtype not in FLOATS:
            raise ValueError(f"{name} must be {' or '.join(map(str, FLOATS))}, not {dtype}: cast it first")
        if dtype != first_dtype:
            raise ValueError(f"{name} is {dtype}, tensors[0] {first_dtype}: cast it first")
        if not is_contiguous:
            raise ValueError(f"{name} must be contiguous: pass {name}.contiguous()")
        slices.append(Slice(offset=offset, numel=numel, first=0, parameter_numel=numel, partial_offset=start))
    return RowTable(slices, first_device)


def _check(table: RowTable, chunk: torch.Tensor, partials: torch.Tensor | None) -> None:
    check_vector("chunk", chunk, dtypes=FLOATS, device=table.device)
    check_aligned("chunk", chunk)
    table.check_room(chunk.numel(), partials)


def launch_flatten(
    table: RowTable,
    tensors: Sequence[torch.Tensor],
    chunk: torch.Tensor,
    partials: torch.Tensor | None,
    *,
    accumulate: bool,
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    """Launch the Triton kernel of ``flatten`` on checked tensors."""
    sums = chunk if partials is None else partials  # the kernel reads no partials then
    rounded_to = FP32 if partials is None or chunk.dtype is not torch.float32 else TYPE_CODES[weight_dtype]
    _launch(flatten_kernel, table, tensors, (chunk, sums), (accumulate, partials is not None, rounded_to))


def launch_unflatten(table: RowTable, chunk: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Launch the Triton kernel of ``unflatten`` on checked tensors."""
    _launch(unflatten_kernel, table, tensors, (chunk,), ())


def _launch(
    kernel: object,
    table: RowTable,
    tensors: Sequence[torch.Tensor],
    others: tuple[torch.Tensor, ...],
    chosen: tuple[bool | int, ...],
) -> None:
    memory, slot = put_addresses(table.device_index, [*map(torch.Tensor.data_ptr, tensors)])
    launch(
        kernel,
        table.programs,
        (table.slice_of, table.rows, memory, *others),
        slot,
        (),
        (TYPE_CODES[tensors[0].dtype], *chosen, *TILE_CONSTANTS),
        TILE_OPTIONS,
        device_index=table.device_index,
        on_host=(2,),  # the addresses
    )
