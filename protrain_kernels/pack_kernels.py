"""The kernels of ``pack`` and ``unpack``: one launch for any number of tensors, a program for a tile of one piece.

A program finds its piece in a table, the piece in a row of int64, and its address in host memory (see [Note: addresses]
in launch.py):

    row = [kind, elements (bytes when raw), first byte in the buffer, first program, bytes of an element,
           whether contiguous, sizes of DIMS dimensions, strides of DIMS dimensions]

KINDS and WIDTHS say in bits which kinds and bytes of an element a launch meets; what it doesn't meet isn't compiled.
Whole aligned tiles move 16 bytes a thread and access.
"""

from __future__ import annotations

import triton
import triton.language as tl

from protrain_kernels.strided import strided_offsets


@triton.jit
def copy_bytes(source: tl.tensor, target: tl.tensor, count: tl.tensor, TILE: tl.constexpr, STEPS: tl.constexpr) -> None:
    """Copies count bytes, at most STEPS * TILE * 4, between two int64 addresses."""
    lane = tl.arange(0, TILE)
    if (source % 16 == 0) & (target % 16 == 0):
        words = count // 16 * 4  # in whole 16 bytes, so that the mask splits no access
        wide_source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
        wide_target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
        for step in range(STEPS):
            index = step * TILE + lane
            mask = index < words
            tl.store(wide_target + index, tl.load(wide_source + index, mask=mask), mask=mask)
        done = count // 16 * 16
        rest = done + tl.arange(0, 16)
        byte = tl.load(source.to(tl.pointer_type(tl.int8)) + rest, mask=rest < count)
        tl.store(target.to(tl.pointer_type(tl.int8)) + rest, byte, mask=rest < count)
    else:
        for step in range(4 * STEPS):
            index = step * TILE + lane
            mask = index < count
            byte = tl.load(source.to(tl.pointer_type(tl.int8)) + index, mask=mask)
            tl.store(target.to(tl.pointer_type(tl.int8)) + index, byte, mask=mask)


@triton.jit
def place_of(row: tl.tensor, first: tl.tensor, DIMS: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Where the elements first, first + 1, ... of a piece lie, in elements from its start."""
    place = first + tl.arange(0, TILE)
    if DIMS > 0 and tl.load(row + 5) == 0:
        place = strided_offsets(row + 6, place, DIMS, WIDE)
    return place


@triton.jit
def load_bytes(
    address: tl.tensor,
    whole: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """A tile of bytes at ``place``; zeros beyond the end. ``whole`` ones are consecutive and aligned."""
    source = address.to(tl.pointer_type(tl.int8))
    index = first + tl.arange(0, TILE)
    if whole:
        value = tl.load(tl.multiple_of(source, 16) + index)
    else:
        value = tl.load(source + place, mask=index < numel, other=0)
    return value


@triton.jit
def store_bytes(
    address: tl.tensor,
    value: tl.tensor,
    whole: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """The inverse of ``load_bytes``."""
    target = address.to(tl.pointer_type(tl.int8))
    index = first + tl.arange(0, TILE)
    if whole:
        tl.store(tl.multiple_of(target, 16) + index, value)
    else:
        tl.store(target + place, value, mask=index < numel)


@triton.jit
def copy_elements(
    source: tl.tensor,
    target: tl.tensor,
    source_place: tl.tensor,
    target_place: tl.tensor,
    mask: tl.tensor,
    ELEMENT: tl.constexpr,
) -> None:
    """Copies elements between two int64 addresses."""
    value = tl.load(source.to(tl.pointer_type(ELEMENT)) + source_place, mask=mask)
    tl.store(target.to(tl.pointer_type(ELEMENT)) + target_place, value, mask=mask)


@triton.jit
def copy_tile(
    source: tl.tensor,
    target: tl.tensor,
    source_place: tl.tensor,
    target_place: tl.tensor,
    mask: tl.tensor,
    width: tl.tensor,
    WIDTHS: tl.constexpr,
) -> None:
    """``copy_elements`` of ``width`` bytes, one of WIDTHS."""
    if WIDTHS & 1 and width == 1:
        copy_elements(source, target, source_place, target_place, mask, tl.int8)
    if WIDTHS & 2 and width == 2:
        copy_elements(source, target, source_place, target_place, mask, tl.int16)
    if WIDTHS & 4 and width == 4:
        copy_elements(source, target, source_place, target_place, mask, tl.int32)
    if WIDTHS & 8 and width == 8:
        copy_elements(source, target, source_place, target_place, mask, tl.int64)


@triton.jit
def packed_bytes(address: tl.tensor, first: tl.tensor) -> tl.tensor:
    """A pointer to byte ``first`` of a piece in the buffer, whose pieces start at multiples of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 16) + first


@triton.jit
def store_bits(target: tl.tensor, bit: tl.tensor, first: tl.tensor, numel: tl.tensor, TILE: tl.constexpr) -> None:
    """Element j of the piece as bit j % 8 of byte j // 8."""
    weights = 1 << tl.arange(0, 8)
    byte = tl.sum(tl.reshape(bit.to(tl.int32), (TILE // 8, 8)) * weights[None, :], axis=1)
    index = tl.arange(0, TILE // 8)
    tl.store(packed_bytes(target, first // 8) + index, byte.to(tl.int8), mask=first + index * 8 < numel)


@triton.jit
def load_bits(source: tl.tensor, first: tl.tensor, numel: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The inverse of ``store_bits``: int32 of 0 or 1."""
    index = tl.arange(0, TILE // 8)
    byte = tl.load(packed_bytes(source, first // 8) + index, mask=first + index * 8 < numel, other=0)
    return tl.reshape((byte.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1, (TILE,))


@triton.jit
def pack_kernel(
    piece_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    packed: tl.tensor,
    slot: tl.tensor,
    KINDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """One program packs a tile of one piece."""
    program = tl.program_id(0)
    index = tl.load(piece_of + program)
    row = rows + index.to(tl.int64) * (6 + 2 * DIMS)
    source = tl.load(addresses + slot + index)
    kind = tl.load(row)
    numel = tl.load(row + 1)
    target = packed.to(tl.int64) + tl.load(row + 2)
    tile = program - tl.load(row + 3)
    first = tile * TILE
    whole = (tl.load(row + 5) != 0) & (source % 16 == 0) & (first + TILE <= numel)
    if KINDS & 1 and kind == 0:
        at = tile * (STEPS * TILE * 4)
        copy_bytes(source + at, target + at, tl.minimum(numel - at, STEPS * TILE * 4), TILE, STEPS)
    place = place_of(row, first, DIMS, WIDE, TILE)
    if KINDS & 2 and kind == 1:
        element = first + tl.arange(0, TILE)
        copy_tile(source, target, place, element, element < numel, tl.load(row + 4), WIDTHS)
    if KINDS & 4 and kind == 2:
        value = load_bytes(source, whole, place, first, numel, TILE)
        store_bits(target, value != 0, first, numel, TILE)


@triton.jit
def unpack_kernel(
    piece_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    packed: tl.tensor,
    slot: tl.tensor,
    KINDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """One program unpacks a tile of one piece."""
    program = tl.program_id(0)
    index = tl.load(piece_of + program)
    row = rows + index.to(tl.int64) * (6 + 2 * DIMS)
    target = tl.load(addresses + slot + index)
    kind = tl.load(row)
    numel = tl.load(row + 1)
    source = packed.to(tl.int64) + tl.load(row + 2)
    tile = program - tl.load(row + 3)
    first = tile * TILE
    whole = (tl.load(row + 5) != 0) & (target % 16 == 0) & (first + TILE <= numel)
    if KINDS & 1 and kind == 0:
        at = tile * (STEPS * TILE * 4)
        copy_bytes(source + at, target + at, tl.minimum(numel - at, STEPS * TILE * 4), TILE, STEPS)
    place = place_of(row, first, DIMS, WIDE, TILE)
    if KINDS & 2 and kind == 1:
        element = first + tl.arange(0, TILE)
        copy_tile(source, target, element, place, element < numel, tl.load(row + 4), WIDTHS)
    if KINDS & 4 and kind == 2:
        bit = load_bits(source, first, numel, TILE)
        store_bytes(target, bit.to(tl.int8), whole, place, first, numel, TILE)
