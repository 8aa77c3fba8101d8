"""The kernels of ``flatten`` and ``unflatten`` and their references; ``flatten`` says what they compute.

A program takes two tiles of one tensor, which is a whole slice of the chunk (see [Note: row tables] in slices.py). The
address of the tensor stands in host memory (see [Note: addresses] in launch.py).

Whole tiles of a tensor that starts at a multiple of 16 bytes are moved 16 bytes a thread and access. A tensor at
another address, and the last tiles of any tensor, are moved element by element under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import padded, tiles
from protrain_kernels.rounding import SumOfSquares, lane_tree, narrow, rounded, sum_of_squares_reference
from protrain_kernels.split_master import widen


def flatten_reference(
    tensors: Sequence[torch.Tensor],
    chunk: torch.Tensor,
    offsets: Sequence[int],
    partials: torch.Tensor | None = None,
    partial_offsets: Sequence[int] | None = None,
    *,
    accumulate: bool = False,
    weight_dtype: torch.dtype = torch.float32,
    squares: SumOfSquares = sum_of_squares_reference,
) -> None:
    """``flatten`` in plain torch, with sums of squares by ``squares``."""
    starts = [0] * len(tensors) if partial_offsets is None else partial_offsets
    for tensor, offset, start in zip(tensors, offsets, starts, strict=True):
        numel = tensor.numel()
        target = chunk[offset : offset + numel]
        if accumulate:
            target.add_(tensor.view(-1))
        else:
            target.copy_(tensor.view(-1))
        chunk[offset + numel : offset + padded(numel)].zero_()
        if partials is not None:
            partials[start : start + tiles(numel)] = squares(target, weight_dtype=weight_dtype)


def unflatten_reference(chunk: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
    """``unflatten`` in plain torch."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor.copy_(chunk[offset : offset + tensor.numel()].view(tensor.shape))


@triton.jit
def typed(address: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """A pointer to elements of TYPE at an int64 address. A bf16 element is an int16: see ``as_bits``."""
    if TYPE == 0:
        return address.to(tl.pointer_type(tl.int16))
    elif TYPE == 1:
        return address.to(tl.pointer_type(tl.float16))
    else:
        return address.to(tl.pointer_type(tl.float32))


@triton.jit
def load_rows(source: tl.tensor, offsets: tl.tensor, LANES: tl.constexpr, COUNT: tl.constexpr) -> tuple[tl.tensor, ...]:
    """COUNT rows from ``offsets`` on, all loaded before the caller stores any of them.

    The compiler keeps a load behind a store that may be to the same address, so rows that are loaded and stored in
    turn would wait for each other.
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
    ACCUMULATE: tl.constexpr,
    ROUNDED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Stores one row of each tile. Returns in fp32 what the chunk then holds, rounded to the type ROUNDED.

    ``stored`` is the loaded row of the tensor, and ``before`` is what the chunk held in its place.
    """
    value = widen(stored)
    if ACCUMULATE:
        value = before + value
    if MASKED:
        value = tl.where(mask, value, 0.0)  # the padding is zero
    if stored.dtype == target.dtype.element_ty and not ACCUMULATE:
        result = stored  # bit for bit, with the payload of a NaN
        held = value
    else:
        result = narrow(value, target)
        held = widen(result)
    if MASKED:
        tl.store(target + target_offsets, result, mask=room)
    else:
        tl.store(target + target_offsets, result)
    return rounded(held, ROUNDED)


@triton.jit(do_not_specialize_on_alignment=["partials"])
def flatten_kernel(
    slice_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    chunk: tl.tensor,
    partials: tl.tensor,
    slot: tl.tensor,
    TYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SQUARES: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program moves GROUP tiles of one tensor into the chunk."""
    program = tl.program_id(0)
    index = tl.load(slice_of + program)
    row = rows + index.to(tl.int64) * 6
    address = tl.load(addresses + slot + index)
    numel = tl.load(row + 2)
    target = chunk + tl.multiple_of(tl.load(row), 128)
    first = (program - tl.load(row + 5)) * (GROUP * ROWS * LANES)
    place = (tl.arange(0, GROUP) * (ROWS * LANES))[:, None] + tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((GROUP, LANES), dtype=tl.float32)
    source = typed(address, TYPE)
    whole = (address % 16 == 0) & (first + GROUP * ROWS * LANES <= numel)
    if whole:
        # An alignment hint belongs to the operation that made the value. Made on a sum inside this branch, it cannot
        # reach the other branch.
        whole_source = tl.multiple_of(source + first, 16)
        whole_target = target + first
        # Accumulation loads two values for each row, so half as many rows are in flight.
        together: tl.constexpr = UNROLL // 2 if ACCUMULATE else UNROLL
        for group in range(0, ROWS, together):
            offsets = group * LANES + place
            loaded = load_rows(whole_source, offsets, LANES, together)
            befores = load_rows(whole_target, offsets, LANES, together) if ACCUMULATE else loaded
            for step in tl.static_range(together):
                mask = place < 0  # unused
                held = flatten_row(
                    loaded[step],
                    befores[step],
                    whole_target,
                    offsets + step * LANES,
                    mask,
                    mask,
                    ACCUMULATE,
                    ROUNDED,
                    MASKED=False,
                )
                lanes = lanes + held * held
    else:
        padded = (numel + 127) // 128 * 128
        for step in range(ROWS):
            offsets = first + step * LANES + place
            mask = offsets < numel
            stored = tl.load(source + offsets, mask=mask, other=0)
            held = flatten_row(
                stored,
                tl.load(target + offsets, mask=mask, other=0.0) if ACCUMULATE else stored,
                target,
                offsets,
                mask,
                offsets < padded,
                ACCUMULATE,
                ROUNDED,
                MASKED=True,
            )
            lanes = lanes + held * held
    if SQUARES:
        tile = tl.arange(0, GROUP)
        started = first + tile * (ROWS * LANES) < numel
        sums = lane_tree(lanes, GROUP, LANES)
        tl.store(partials + tl.load(row + 4) + first // (ROWS * LANES) + tile, sums, mask=started)


@triton.jit
def unflattened(stored: tl.tensor, target: tl.tensor) -> tl.tensor:
    """Loaded values cast to the element type of the pointer ``target``; their own bits where that is their type."""
    if stored.dtype == target.dtype.element_ty:
        return stored
    else:
        return narrow(widen(stored), target)


@triton.jit
def unflatten_kernel(
    slice_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    chunk: tl.tensor,
    slot: tl.tensor,
    TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program moves GROUP tiles of one tensor out of the chunk."""
    program = tl.program_id(0)
    index = tl.load(slice_of + program)
    row = rows + index.to(tl.int64) * 6
    address = tl.load(addresses + slot + index)
    numel = tl.load(row + 2)
    source = chunk + tl.multiple_of(tl.load(row), 128)
    first = (program - tl.load(row + 5)) * (GROUP * ROWS * LANES)
    place = (tl.arange(0, GROUP) * (ROWS * LANES))[:, None] + tl.arange(0, LANES)[None, :]
    target = typed(address, TYPE)
    whole = (address % 16 == 0) & (first + GROUP * ROWS * LANES <= numel)
    if whole:
        whole_source = source + first
        whole_target = tl.multiple_of(target + first, 16)  # inside the branch, as in flatten_kernel
        for group in range(0, ROWS, UNROLL):
            offsets = group * LANES + place
            loaded = load_rows(whole_source, offsets, LANES, UNROLL)
            for step in tl.static_range(UNROLL):
                tl.store(whole_target + offsets + step * LANES, unflattened(loaded[step], target))
    else:
        for step in range(ROWS):
            offsets = first + step * LANES + place
            mask = offsets < numel
            stored = tl.load(source + offsets, mask=mask, other=0)
            tl.store(target + offsets, unflattened(stored, target), mask=mask)
