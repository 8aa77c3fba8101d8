"""A block's saved activations -> one contiguous buffer, in one launch whatever their number, and views of it.

    buffer[start : start + bytes of a storage] = the bytes of the storage        start: a multiple of 256

``pack`` is ``flatten`` of whole storages, which it reads as words of 16 bits. Views of one storage are packed once.
``unpack`` costs neither time nor memory: the tensors come back as views of the buffer, bit for bit, with their shapes,
strides and addresses modulo 256, so that whatever reads them picks the same algorithm.

Bytes moved by ``pack``: every storage read and the buffer written, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from protrain_kernels.checks import ALIGNMENT_BYTES, check_aligned, check_vector, padded
from protrain_kernels.flatten import flatten

_WORD = torch.bfloat16  # of which flatten copies the bits


PackedView = tuple[torch.Size, tuple[int, ...], torch.dtype, int]  # shape, strides, type, and first byte in the buffer


class Packed(NamedTuple):
    """Tensors in one buffer, and how to get them out of it. A copy of the buffer may take its place."""

    buffer: torch.Tensor  # [bytes] uint8
    views: tuple[PackedView, ...]  # one for each tensor; those that are not wanted may be left out


def pack(tensors: Sequence[torch.Tensor]) -> Packed:
    """Pack the storages of tensors, each once, into one buffer.

    Args:
        tensors: one or more strided tensors on one device, of any type, stride and number; unchanged. Storages are
            packed whole, also where the tensors have only a part of them.

    Raises:
        ValueError: a tensor is on another device, or is not plain and strided.
    """
    starts: dict[int, int] = {}  # in bytes, by the address of a storage
    storages, words, offsets, views, end = [], [], [], [], 0
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"tensors[{index}] must be a plain strided tensor: pass its .to_dense(), .resolve_conj() or "
                ".resolve_neg()"
            )
        address = tensor.untyped_storage().data_ptr()
        if address not in starts:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            starts[address] = end
            storages.append(flat)
            words.append(flat[: flat.numel() // 2 * 2].view(_WORD))
            offsets.append(end // 2)
            end += 2 * padded(-(-flat.numel() // 2))
        first = starts[address] + int(tensor.storage_offset()) * tensor.itemsize
        views.append((tensor.shape, tensor.stride(), tensor.dtype, first))
    chunk = torch.empty(end // 2, dtype=_WORD, device=tensors[0].device)
    flatten(words, chunk, offsets)
    buffer = chunk.view(torch.uint8)
    for flat, offset in zip(storages, offsets, strict=True):
        if flat.numel() % 2:
            buffer[2 * offset + flat.numel() - 1].copy_(flat[-1])
    return Packed(buffer, tuple(views))


def unpack(packed: Packed, *, copies: bool = False) -> list[torch.Tensor]:
    """The tensors that ``pack`` packed, as views of the buffer.

    Args:
        packed: what ``pack`` returned, or the same with a copy of its buffer on any device, or with some of its views.
        copies: give each memory of its own, without which it would keep the whole buffer. Addresses modulo 256 stay.

    Raises:
        ValueError: the buffer has another type or layout, or starts at no multiple of 256 bytes in its storage.
    """
    buffer, found = packed.buffer, []
    check_vector("buffer", buffer, dtypes=(torch.uint8,), device=buffer.device)
    check_aligned("buffer", buffer)
    for shape, stride, dtype, first in packed.views:
        memory, place = buffer, first
        if copies:
            span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            place = first % ALIGNMENT_BYTES
            memory = buffer[first - place : first + span * dtype.itemsize * (0 not in shape)].clone()
        place += int(memory.storage_offset())
        view = torch.empty(0, dtype=dtype, device=buffer.device)
        found.append(view.set_(memory.untyped_storage(), place // dtype.itemsize, shape, stride))
    return found
