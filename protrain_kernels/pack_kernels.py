"""The kernels of ``pack`` and ``unpack``: one launch for any number of tensors, a program for a tile of one piece.

A program finds its piece in a table, the piece in a row of int64, and its address in host memory (see [Note: addresses]
in launch.py):

    row = [kind, elements (bytes when raw), first byte in the buffer, first header, first program, bytes of an element,
           type (see flatten_kernels), whether contiguous, sizes of DIMS dimensions, strides of DIMS dimensions]

KINDS, WIDTHS and TYPES say in bits which kinds, bytes of an element and types a launch meets; what it doesn't meet
isn't compiled. Whole aligned tiles move 16 bytes a thread and access.
"""

from __future__ import annotations

import triton
import triton.language as tl

from protrain_kernels.flatten_kernels import narrow, typed
from protrain_kernels.split_master import widen
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
    if DIMS > 0 and tl.load(row + 7) == 0:
        place = strided_offsets(row + 8, place, DIMS, WIDE)
    return place


@triton.jit
def load_tile(
    address: tl.tensor,
    ELEMENT: tl.constexpr,
    whole: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """A tile of elements at ``place``; zeros beyond the end. ``whole`` ones are consecutive and aligned."""
    source = address.to(tl.pointer_type(ELEMENT))
    index = first + tl.arange(0, TILE)
    if whole:
        value = tl.load(tl.multiple_of(source, 16) + index)
    else:
        value = tl.load(source + place, mask=index < numel, other=0)
    return value


@triton.jit
def store_tile(
    address: tl.tensor,
    value: tl.tensor,
    ELEMENT: tl.constexpr,
    whole: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """The inverse of ``load_tile``."""
    target = address.to(tl.pointer_type(ELEMENT))
    index = first + tl.arange(0, TILE)
    if whole:
        tl.store(tl.multiple_of(target, 16) + index, value)
    else:
        tl.store(target + place, value, mask=index < numel)


@triton.jit
def load_typed(
    address: tl.tensor,
    TYPE: tl.constexpr,
    whole: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """``load_tile`` of a type by its code; bf16 as int16."""
    if TYPE == 0:
        return load_tile(address, tl.int16, whole, place, first, numel, TILE)
    elif TYPE == 1:
        return load_tile(address, tl.float16, whole, place, first, numel, TILE)
    else:
        return load_tile(address, tl.float32, whole, place, first, numel, TILE)


@triton.jit
def store_bits_of(
    address: tl.tensor,
    bits: tl.tensor,
    TYPE: tl.constexpr,
    whole: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """``store_tile`` of int32 whose low bits are elements of a type by its code."""
    if TYPE == 2:
        store_tile(address, bits, tl.int32, whole, place, first, numel, TILE)
    else:
        store_tile(address, bits.to(tl.int16), tl.int16, whole, place, first, numel, TILE)


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
def packed_tile(address: tl.tensor, ELEMENT: tl.constexpr, first: tl.tensor) -> tl.tensor:
    """A pointer to element ``first`` of a piece in the buffer, whose pieces start at multiples of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16) + first


@triton.jit
def store_bits(target: tl.tensor, bit: tl.tensor, first: tl.tensor, numel: tl.tensor, TILE: tl.constexpr) -> None:
    """Element j of the piece as bit j % 8 of byte j // 8."""
    weights = 1 << tl.arange(0, 8)
    byte = tl.sum(tl.reshape(bit.to(tl.int32), (TILE // 8, 8)) * weights[None, :], axis=1)
    index = tl.arange(0, TILE // 8)
    tl.store(packed_tile(target, tl.int8, first // 8) + index, byte.to(tl.int8), mask=first + index * 8 < numel)


@triton.jit
def load_bits(source: tl.tensor, first: tl.tensor, numel: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The inverse of ``store_bits``: int32 of 0 or 1."""
    index = tl.arange(0, TILE // 8)
    byte = tl.load(packed_tile(source, tl.int8, first // 8) + index, mask=first + index * 8 < numel, other=0)
    return tl.reshape((byte.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1, (TILE,))


@triton.jit
def element_bits(value: tl.tensor) -> tl.tensor:
    """int32 of the bits of loaded bf16 (as int16), fp16 or fp32."""
    if value.dtype == tl.float32:
        return value.to(tl.int32, bitcast=True)
    else:
        return value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def pack_mask(
    value: tl.tensor,
    buffer: tl.tensor,
    target: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """A tile of two distinct bit patterns to bits; its header is [one, other, whether there were more, 0]."""
    bits = element_bits(value)
    lane = tl.arange(0, TILE)
    one = tl.sum(tl.where(lane == 0, bits, 0), axis=0)
    bits = tl.where(first + lane < numel, bits, one)
    other = tl.max(tl.where(bits == one, -2147483648, bits), axis=0)
    more = tl.max(tl.where((bits == one) | (bits == other), 0, 1), axis=0)
    if value.dtype == tl.float32:
        nan = 0x7FC00000
    elif value.dtype == tl.float16:
        nan = 0x7E00
    else:
        nan = 0x7FC0
    header = buffer.to(tl.pointer_type(tl.int32)) + (tl.load(row + 3) + first // TILE) * 4
    tl.store(header, tl.where(more != 0, nan, one))
    tl.store(header + 1, tl.where(more != 0, nan, other))
    tl.store(header + 2, more)
    tl.store(header + 3, 0)
    store_bits(target, bits != one, first, numel, TILE)


@triton.jit
def fp8_of(scaled: tl.tensor) -> tl.tensor:
    """int32 codes of fp32 below 256 in magnitude: e4m3, to nearest, ties to even; 0x7E infinite, 0x7F NaN."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Adding 2^14 rounds to a multiple of 2^-9, the smallest e4m3.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    # Never up to 256: twice the largest value of a type would be infinite.
    code = tl.minimum(tl.where(magnitude < (121 << 23), small, normal), 0x77)
    code = tl.where(magnitude == 0x7F800000, 0x7E, tl.where(magnitude > 0x7F800000, 0x7F, code))
    return code | ((bits >> 24) & 0x80)


@triton.jit
def fp8_value(code: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """fp32 of ``fp8_of`` codes times the inverse of their scale."""
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal) * inverse
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(magnitude == 0x7E, 0x7F800000, tl.where(magnitude == 0x7F, 0x7FC00000, bits))
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def pack_fp8(
    value: tl.tensor,
    buffer: tl.tensor,
    target: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    numel: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """A tile to fp8 with a power of two for scale; its header is [1 / scale, largest error, largest magnitude, 0]."""
    value = widen(value)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    largest = tl.max(tl.where(finite, magnitude, 0), axis=0)
    # The largest magnitude becomes 128 or more, below 256; the scale and its inverse are normal numbers.
    exponent = tl.minimum(261 - (largest >> 23), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    code = fp8_of(value * scale)
    error = tl.where(finite, tl.abs(fp8_value(code, inverse) - value), 0.0)
    header = buffer.to(tl.pointer_type(tl.int32)) + (tl.load(row + 3) + first // TILE) * 4
    tl.store(header, inverse.to(tl.int32, bitcast=True))
    tl.store(header + 1, tl.max(error, axis=0).to(tl.int32, bitcast=True))
    tl.store(header + 2, largest)
    tl.store(header + 3, 0)
    index = first + tl.arange(0, TILE)
    tl.store(packed_tile(target, tl.int8, first) + tl.arange(0, TILE), code.to(tl.int8), mask=index < numel)


@triton.jit
def pack_kernel(
    piece_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    packed: tl.tensor,
    slot: tl.tensor,
    KINDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    TYPES: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """One program packs a tile of one piece."""
    program = tl.program_id(0)
    index = tl.load(piece_of + program)
    row = rows + index.to(tl.int64) * (8 + 2 * DIMS)
    source = tl.load(addresses + slot + index)
    kind = tl.load(row)
    numel = tl.load(row + 1)
    buffer = packed.to(tl.int64)
    target = buffer + tl.load(row + 2)
    tile = program - tl.load(row + 4)
    first = tile * TILE
    whole = (tl.load(row + 7) != 0) & (source % 16 == 0) & (first + TILE <= numel)
    if KINDS & 1 and kind == 0:
        at = tile * (STEPS * TILE * 4)
        copy_bytes(source + at, target + at, tl.minimum(numel - at, STEPS * TILE * 4), TILE, STEPS)
    place = place_of(row, first, DIMS, WIDE, TILE)
    if KINDS & 2 and kind == 1:
        element = first + tl.arange(0, TILE)
        copy_tile(source, target, place, element, element < numel, tl.load(row + 5), WIDTHS)
    if KINDS & 4 and kind == 2:
        value = load_tile(source, tl.int8, whole, place, first, numel, TILE)
        store_bits(target, value != 0, first, numel, TILE)
    for code in tl.static_range(3):
        if KINDS & 8 and TYPES & (1 << code) and (kind == 3) & (tl.load(row + 6) == code):
            value = load_typed(source, code, whole, place, first, numel, TILE)
            pack_mask(value, buffer, target, row, first, numel, TILE)
    for code in tl.static_range(3):
        if KINDS & 16 and TYPES & (1 << code) and (kind == 4) & (tl.load(row + 6) == code):
            value = load_typed(source, code, whole, place, first, numel, TILE)
            pack_fp8(value, buffer, target, row, first, numel, TILE)


@triton.jit
def unpack_kernel(
    piece_of: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    packed: tl.tensor,
    slot: tl.tensor,
    KINDS: tl.constexpr,
    WIDTHS: tl.constexpr,
    TYPES: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """One program unpacks a tile of one piece."""
    program = tl.program_id(0)
    index = tl.load(piece_of + program)
    row = rows + index.to(tl.int64) * (8 + 2 * DIMS)
    target = tl.load(addresses + slot + index)
    kind = tl.load(row)
    numel = tl.load(row + 1)
    buffer = packed.to(tl.int64)
    source = buffer + tl.load(row + 2)
    tile = program - tl.load(row + 4)
    first = tile * TILE
    whole = (tl.load(row + 7) != 0) & (target % 16 == 0) & (first + TILE <= numel)
    if KINDS & 1 and kind == 0:
        at = tile * (STEPS * TILE * 4)
        copy_bytes(source + at, target + at, tl.minimum(numel - at, STEPS * TILE * 4), TILE, STEPS)
    place = place_of(row, first, DIMS, WIDE, TILE)
    if KINDS & 2 and kind == 1:
        element = first + tl.arange(0, TILE)
        copy_tile(source, target, element, place, element < numel, tl.load(row + 5), WIDTHS)
    if KINDS & 4 and kind == 2:
        bit = load_bits(source, first, numel, TILE)
        store_tile(target, bit.to(tl.int8), tl.int8, whole, place, first, numel, TILE)
    header = buffer.to(tl.pointer_type(tl.int32)) + (tl.load(row + 3) + tile) * 4
    if KINDS & 8 and kind == 3:
        bit = load_bits(source, first, numel, TILE)
        bits = tl.where(bit != 0, tl.load(header + 1), tl.load(header))
        for code in tl.static_range(3):
            if TYPES & (1 << code) and tl.load(row + 6) == code:
                store_bits_of(target, bits, code, whole, place, first, numel, TILE)
    if KINDS & 16 and kind == 4:
        lane = tl.arange(0, TILE)
        byte = tl.load(packed_tile(source, tl.int8, first) + lane, mask=first + lane < numel, other=0)
        value = fp8_value(byte.to(tl.int32), tl.load(header).to(tl.float32, bitcast=True))
        for code in tl.static_range(3):
            if TYPES & (1 << code) and tl.load(row + 6) == code:
                bits = element_bits(narrow(value, typed(target, code)))
                store_bits_of(target, bits, code, whole, place, first, numel, TILE)
