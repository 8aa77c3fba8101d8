"""The kernels of ``flatten`` and ``unflatten`` and their references; what they compute is said in ``flatten``.

One launch serves any number of tensors: a program takes two tiles of one tensor. It finds its tensor in a table, the
tensor's layout in a row of int64, and its address in host memory (see [Note: addresses] in launch.py):

    row = [elements, offset in the chunk, offset in the partials, first program, type, whether contiguous,
           sizes of DIMS dimensions, strides of DIMS dimensions]

Whole tiles of a contiguous tensor at a multiple of 16 bytes move 16 bytes a thread and access. Everything else
(strides, odd addresses, a tensor's last tiles) goes element by element through a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import padded, tiles
from protrain_kernels.split_master import widen
from protrain_kernels.strided import strided_offsets
from protrain_kernels.sum_of_squares import lane_tree, sum_of_squares_reference

BF16, FP16, FP32, MIXED = 0, 1, 2, 3  # TYPE


def flatten_reference(
    tensors: Sequence[torch.Tensor],
    chunk: torch.Tensor,
    offsets: Sequence[int],
    partials: torch.Tensor | None = None,
    partial_offsets: Sequence[int] | None = None,
    *,
    accumulate: bool = False,
    scale: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
) -> None:
    """``flatten`` in plain torch."""
    starts = [0] * len(tensors) if partial_offsets is None else partial_offsets
    for tensor, offset, start in zip(tensors, offsets, starts, strict=True):
        numel = tensor.numel()
        target = chunk[offset : offset + numel]
        values = _scaled(tensor.reshape(-1), scale)
        target.copy_(target + values if accumulate else values)
        chunk[offset + numel : offset + padded(numel)].zero_()
        if partials is not None:
            partials[start : start + tiles(numel)] = sum_of_squares_reference(target)
        if nonfinite is not None:
            nonfinite.logical_or_(~target.isfinite().all())


def unflatten_reference(
    chunk: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int], *, scale: torch.Tensor | None = None
) -> None:
    """``unflatten`` in plain torch."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor.copy_(_scaled(chunk[offset : offset + tensor.numel()], scale).view(tensor.shape))


def _scaled(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return values if scale is None else values.float() * scale.reshape(1)


@triton.jit
def typed(address: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """A pointer to elements of TYPE at an int64 address; bf16 as int16 (see as_bits)."""
    if TYPE == 0:
        return address.to(tl.pointer_type(tl.int16))
    elif TYPE == 1:
        return address.to(tl.pointer_type(tl.float16))
    else:
        return address.to(tl.pointer_type(tl.float32))


@triton.jit
def narrow(value: tl.tensor, like: tl.tensor) -> tl.tensor:
    """fp32 rounded to nearest, ties to even, as torch casts to the element type of the pointer ``like``."""
    if like.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value != value, 0x7FC0, rounded).to(tl.int16)
    else:
        return value.to(like.dtype.element_ty)


@triton.jit
def load_rows(source: tl.tensor, offsets: tl.tensor, LANES: tl.constexpr, COUNT: tl.constexpr) -> tuple[tl.tensor, ...]:
    """COUNT rows from ``offsets`` on, to be loaded before any of them is stored.

    A load doesn't pass a store that might be to its address, so rows loaded and stored in turn wait for each other.
    """
    if COUNT == 1:
        return (tl.load(source + offsets),)
    else:
        rows = load_rows(source, offsets, LANES, COUNT - 1)
        rows += (tl.load(source + offsets + (COUNT - 1) * LANES),)
        return rows


@triton.jit
def flatten_row(
    stored: tl.tensor,
    before: tl.tensor,
    target: tl.tensor,
    target_offsets: tl.tensor,
    mask: tl.tensor,
    room: tl.tensor,
    factor: tl.tensor,
    ACCUMULATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Moves a row of each tile, loaded like what the chunk held before. Returns fp32 of what it holds now."""
    value = widen(stored)
    if HAS_SCALE:
        value = value * factor
    if ACCUMULATE:
        value = before + value
    if MASKED:
        value = tl.where(mask, value, 0.0)  # the padding: zero whatever the scale
    if stored.dtype == target.dtype.element_ty and not HAS_SCALE and not ACCUMULATE:
        result = stored  # bit for bit, a NaN's payload too
        held = value
    else:
        result = narrow(value, target)
        held = widen(result)
    if MASKED:
        tl.store(target + target_offsets, result, mask=room)
    else:
        tl.store(target + target_offsets, result)
    return held


@triton.jit
def flatten_tiles(
    address: tl.tensor,
    target: tl.tensor,
    row: tl.tensor,
    numel: tl.tensor,
    first: tl.tensor,
    factor: tl.tensor,
    TYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    FINITE: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Moves GROUP tiles of one tensor. Returns sums of squares by tile and lane, and the largest absolute bits."""
    place = (tl.arange(0, GROUP) * (ROWS * LANES))[:, None] + tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((GROUP, LANES), dtype=tl.float32)
    largest = tl.zeros((GROUP, LANES), dtype=tl.int32)
    source = typed(address, TYPE)
    whole = (tl.load(row + 5) != 0) & (address % 16 == 0) & (first + GROUP * ROWS * LANES <= numel)
    if whole:
        # A hint belongs to the operation that made the value: on a sum of this branch, the other one can't inherit it.
        whole_source = tl.multiple_of(source + first, 16)
        whole_target = target + first
        # With accumulate a row is two loads: half the rows are in flight.
        together: tl.constexpr = UNROLL // 2 if ACCUMULATE else UNROLL
        for group in range(0, ROWS, together):
            offsets = group * LANES + place
            rows = load_rows(whole_source, offsets, LANES, together)
            befores = load_rows(whole_target, offsets, LANES, together) if ACCUMULATE else rows
            for step in tl.static_range(together):
                mask = place < 0  # unused
                held = flatten_row(
                    rows[step],
                    befores[step],
                    whole_target,
                    offsets + step * LANES,
                    mask,
                    mask,
                    factor,
                    ACCUMULATE,
                    HAS_SCALE,
                    MASKED=False,
                )
                lanes = lanes + held * held
                if FINITE:
                    largest = tl.maximum(largest, held.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    else:
        padded = (numel + 127) // 128 * 128
        for step in range(ROWS):
            offsets = first + step * LANES + place
            source_offsets = offsets if DIMS == 0 else strided_offsets(row + 6, offsets, DIMS, WIDE)
            mask = offsets < numel
            stored = tl.load(source + source_offsets, mask=mask, other=0)
            held = flatten_row(
                stored,
                tl.load(target + offsets, mask=mask, other=0.0) if ACCUMULATE else stored,
                target,
                offsets,
                mask,
                offsets < padded,
                factor,
                ACCUMULATE,
                HAS_SCALE,
                MASKED=True,
            )
            lanes = lanes + held * held
            if FINITE:
                largest = tl.maximum(largest, held.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return lanes, largest


@triton.jit(do_not_specialize_on_alignment=["partials", "scale", "nonfinite"])
def flatten_kernel(
    tensor_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    chunk: tl.tensor,
    partials: tl.tensor,
    scale: tl.tensor,
    nonfinite: tl.tensor,
    slot: tl.tensor,
    TYPE: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SQUARES: tl.constexpr,
    FINITE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program moves GROUP tiles of one tensor into the chunk."""
    program = tl.program_id(0)
    index = tl.load(tensor_of + program)
    row = rows + index.to(tl.int64) * (6 + 2 * DIMS)
    address = tl.load(addresses + slot + index)
    numel = tl.load(row)
    target = chunk + tl.multiple_of(tl.load(row + 1), 128)
    first = (program - tl.load(row + 3)) * (GROUP * ROWS * LANES)
    factor = 1.0
    if HAS_SCALE:
        factor = tl.load(scale)
    kind = tl.load(row + 4) if TYPE == 3 else TYPE
    if kind == 0:
        lanes, largest = flatten_tiles(
            address,
            target,
            row,
            numel,
            first,
            factor,
            0,
            ACCUMULATE,
            HAS_SCALE,
            FINITE,
            DIMS,
            WIDE,
            GROUP,
            ROWS,
            LANES,
            UNROLL,
        )
    elif kind == 1:
        lanes, largest = flatten_tiles(
            address,
            target,
            row,
            numel,
            first,
            factor,
            1,
            ACCUMULATE,
            HAS_SCALE,
            FINITE,
            DIMS,
            WIDE,
            GROUP,
            ROWS,
            LANES,
            UNROLL,
        )
    else:
        lanes, largest = flatten_tiles(
            address,
            target,
            row,
            numel,
            first,
            factor,
            2,
            ACCUMULATE,
            HAS_SCALE,
            FINITE,
            DIMS,
            WIDE,
            GROUP,
            ROWS,
            LANES,
            UNROLL,
        )
    if SQUARES:
        tile = tl.arange(0, GROUP)
        started = first + tile * (ROWS * LANES) < numel
        sums = lane_tree(lanes, GROUP, LANES)
        tl.store(partials + tl.load(row + 2) + first // (ROWS * LANES) + tile, sums, mask=started)
    if FINITE:
        # Every program that finds a value that isn't finite writes the same 1: no atomic, no order.
        tl.store(nonfinite, 1, mask=tl.max(tl.max(largest, axis=1), axis=0) >= 0x7F800000)


@triton.jit
def unflatten_tiles(
    address: tl.tensor,
    source: tl.tensor,
    row: tl.tensor,
    numel: tl.tensor,
    first: tl.tensor,
    factor: tl.tensor,
    TYPE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Moves GROUP tiles out of the chunk into one tensor."""
    place = (tl.arange(0, GROUP) * (ROWS * LANES))[:, None] + tl.arange(0, LANES)[None, :]
    target = typed(address, TYPE)
    whole = (tl.load(row + 5) != 0) & (address % 16 == 0) & (first + GROUP * ROWS * LANES <= numel)
    if whole:
        whole_source = source + first
        whole_target = tl.multiple_of(target + first, 16)  # see flatten_tiles
        for group in range(0, ROWS, UNROLL):
            offsets = group * LANES + place
            rows = load_rows(whole_source, offsets, LANES, UNROLL)
            for step in tl.static_range(UNROLL):
                value = unflattened(rows[step], source, target, factor, HAS_SCALE)
                tl.store(whole_target + offsets + step * LANES, value)
    else:
        for step in range(ROWS):
            offsets = first + step * LANES + place
            mask = offsets < numel
            stored = tl.load(source + offsets, mask=mask, other=0)
            target_offsets = offsets if DIMS == 0 else strided_offsets(row + 6, offsets, DIMS, WIDE)
            tl.store(target + target_offsets, unflattened(stored, source, target, factor, HAS_SCALE), mask=mask)


@triton.jit
def unflattened(
    stored: tl.tensor, source: tl.tensor, target: tl.tensor, factor: tl.tensor, HAS_SCALE: tl.constexpr
) -> tl.tensor:
    """Loaded values scaled and cast to the target's type; untouched bits where that changes nothing."""
    if stored.dtype == target.dtype.element_ty and not HAS_SCALE:
        return stored
    elif HAS_SCALE:
        return narrow(widen(stored) * factor, target)
    else:
        return narrow(widen(stored), target)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def unflatten_kernel(
    tensor_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    chunk: tl.tensor,
    scale: tl.tensor,
    slot: tl.tensor,
    TYPE: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program moves GROUP tiles of one tensor out of the chunk."""
    program = tl.program_id(0)
    index = tl.load(tensor_of + program)
    row = rows + index.to(tl.int64) * (6 + 2 * DIMS)
    address = tl.load(addresses + slot + index)
    numel = tl.load(row)
    source = chunk + tl.multiple_of(tl.load(row + 1), 128)
    first = (program - tl.load(row + 3)) * (GROUP * ROWS * LANES)
    factor = 1.0
    if HAS_SCALE:
        factor = tl.load(scale)
    kind = tl.load(row + 4) if TYPE == 3 else TYPE
    if kind == 0:
        unflatten_tiles(
            address, source, row, numel, first, factor, 0, HAS_SCALE, DIMS, WIDE, GROUP, ROWS, LANES, UNROLL
        )
    elif kind == 1:
        unflatten_tiles(
            address, source, row, numel, first, factor, 1, HAS_SCALE, DIMS, WIDE, GROUP, ROWS, LANES, UNROLL
        )
    else:
        unflatten_tiles(
            address, source, row, numel, first, factor, 2, HAS_SCALE, DIMS, WIDE, GROUP, ROWS, LANES, UNROLL
        )
