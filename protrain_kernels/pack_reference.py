"""``pack`` and ``unpack`` in plain torch, piece by piece: what the kernels must equal, and what runs on the CPU."""

from __future__ import annotations

import torch

from protrain_kernels.pack_layout import BITS, Piece

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_piece(piece: Piece, storage: torch.UntypedStorage, start_bytes: int, buffer: torch.Tensor) -> None:
    """Write a piece, whose elements start at ``start_bytes`` of ``storage``, into its place of ``buffer``."""
    values = _elements(piece, storage, start_bytes).contiguous().view(-1)
    packed = _pack_bits(values) if piece.kind == BITS else values.view(torch.uint8)
    buffer[piece.offset_bytes : piece.offset_bytes + piece.packed_bytes] = packed


def unpack_piece(piece: Piece, storage: torch.UntypedStorage, start_bytes: int, buffer: torch.Tensor) -> None:
    """Write a piece of ``buffer`` to where its elements lie, from ``start_bytes`` of ``storage``."""
    packed = buffer[piece.offset_bytes : piece.offset_bytes + piece.packed_bytes]
    target = _elements(piece, storage, start_bytes)
    values = _unpack_bits(packed, piece.numel) if piece.kind == BITS else packed.view(piece.dtype)
    target.copy_(values.view(target.shape))


def _elements(piece: Piece, storage: torch.UntypedStorage, start_bytes: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=piece.dtype, device=storage.device)
    return empty.set_(storage, start_bytes // piece.dtype.itemsize, piece.sizes, piece.strides)


def _pack_bits(values: torch.Tensor) -> torch.Tensor:
    count = -(-values.numel() // 8)
    padded = torch.zeros(8 * count, dtype=torch.uint8, device=values.device)
    padded[: values.numel()] = values.view(torch.uint8) != 0
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=values.device)
    return (padded.view(count, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] & weights).ne(0).view(-1)[:numel]
