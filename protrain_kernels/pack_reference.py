"""``pack`` and ``unpack`` in plain torch, piece by piece: what the kernels must equal, and what runs on the CPU."""

from __future__ import annotations

import torch

from protrain_kernels.pack_layout import BITS, FP8, HEADER_BYTES, MASK, TILE, Piece

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)
_NAN_BITS = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}


def pack_piece(piece: Piece, storage: torch.UntypedStorage, start_bytes: int, buffer: torch.Tensor) -> None:
    """Write a piece, whose elements start at ``start_bytes`` of ``storage``, into its place of ``buffer``."""
    values = _elements(piece, storage, start_bytes).contiguous().view(-1)
    if piece.kind == BITS:
        packed = _pack_bits(values)
    elif piece.kind == MASK:
        packed = _pack_mask(values, _headers(piece, buffer))
    elif piece.kind == FP8:
        packed = _pack_fp8(values, _headers(piece, buffer))
    else:
        packed = values.view(torch.uint8)
    buffer[piece.offset_bytes : piece.offset_bytes + piece.packed_bytes] = packed


def unpack_piece(piece: Piece, storage: torch.UntypedStorage, start_bytes: int, buffer: torch.Tensor) -> None:
    """Write a piece of ``buffer`` to where its elements lie, from ``start_bytes`` of ``storage``."""
    packed = buffer[piece.offset_bytes : piece.offset_bytes + piece.packed_bytes]
    target = _elements(piece, storage, start_bytes)
    if piece.kind == BITS:
        values = _unpack_bits(packed, piece.numel).view(torch.bool)
    elif piece.kind == MASK:
        one, other, _, _ = _headers(piece, buffer).unbind(1)
        bit = _tiled(_unpack_bits(packed, piece.numel))
        bits = torch.where(bit != 0, other[:, None], one[:, None]).reshape(-1)[: piece.numel]
        values = bits.to(torch.int32 if piece.dtype == torch.float32 else torch.int16).view(piece.dtype)
    elif piece.kind == FP8:
        inverse = _headers(piece, buffer)[:, :1].view(torch.float32)
        decoded = _fp8_value(_tiled(packed).to(torch.int32), inverse)
        values = decoded.reshape(-1)[: piece.numel].to(piece.dtype)
    else:
        values = packed.view(piece.dtype)
    target.copy_(values.view(target.shape))


def _elements(piece: Piece, storage: torch.UntypedStorage, start_bytes: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=piece.dtype, device=storage.device)
    return empty.set_(storage, start_bytes // piece.dtype.itemsize, piece.sizes, piece.strides)


def _headers(piece: Piece, buffer: torch.Tensor) -> torch.Tensor:
    start = HEADER_BYTES * piece.header
    return buffer[start : start + HEADER_BYTES * piece.tiles].view(torch.int32).view(piece.tiles, 4)


def _tiled(values: torch.Tensor) -> torch.Tensor:
    """[tiles, TILE], zeros at the end."""
    tiles = -(-values.numel() // TILE)
    padded = torch.zeros(tiles * TILE, dtype=values.dtype, device=values.device)
    padded[: values.numel()] = values
    return padded.view(tiles, TILE)


def _pack_bits(values: torch.Tensor) -> torch.Tensor:
    count = -(-values.numel() // 8)
    padded = torch.zeros(8 * count, dtype=torch.uint8, device=values.device)
    padded[: values.numel()] = values.view(torch.uint8) != 0
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=values.device)
    return (padded.view(count, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] & weights).ne(0).to(torch.uint8).view(-1)[:numel]


def _pack_mask(values: torch.Tensor, headers: torch.Tensor) -> torch.Tensor:
    narrow = values.dtype != torch.float32
    bits = values.view(torch.int16).to(torch.int32) & 0xFFFF if narrow else values.view(torch.int32)
    tiles = _tiled(bits)
    one = tiles[:, :1]
    beyond = torch.arange(tiles.numel(), device=tiles.device).view(tiles.shape) >= values.numel()
    tiles = torch.where(beyond, one, tiles)
    smallest = torch.iinfo(torch.int32).min
    other = torch.where(tiles == one, smallest, tiles).amax(1, keepdim=True)
    more = ((tiles != one) & (tiles != other)).any(1, keepdim=True)
    pair = torch.cat([one, other], 1).masked_fill(more, _NAN_BITS[values.dtype])
    headers.copy_(torch.cat([pair, more.to(torch.int32), torch.zeros_like(one)], 1))
    return _pack_bits((tiles != one).to(torch.uint8).view(-1)[: values.numel()])


def _pack_fp8(values: torch.Tensor, headers: torch.Tensor) -> torch.Tensor:
    tiles = _tiled(values.to(torch.float32))
    magnitude = tiles.view(torch.int32) & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    largest = torch.where(finite, magnitude, 0).amax(1, keepdim=True)
    exponent = (261 - (largest >> 23)).clamp(max=253)
    scale = (exponent << 23).view(torch.float32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    # torch's cast rounds to nearest, ties to even, as the kernel does; past 240 it is held back.
    code = (tiles * scale).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32) & 0x7F
    code = code.clamp(max=0x77)
    code = torch.where(finite, code, torch.where(magnitude == 0x7F800000, 0x7E, 0x7F))
    code = code | ((tiles.view(torch.int32) >> 24) & 0x80)
    error = torch.where(finite, (_fp8_value(code, inverse) - tiles).abs(), 0.0).amax(1, keepdim=True)
    words = [inverse.view(torch.int32), error.view(torch.int32), largest, torch.zeros_like(largest)]
    headers.copy_(torch.cat(words, 1))
    return code.to(torch.uint8).view(-1)[: values.numel()]


def _fp8_value(code: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    magnitude = code & 0x7F
    value = magnitude.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32) * inverse
    value = torch.where(magnitude == 0x7E, torch.inf, torch.where(magnitude == 0x7F, torch.nan, value))
    return torch.where((code & 0x80) != 0, -value, value)
