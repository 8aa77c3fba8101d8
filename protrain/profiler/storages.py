"""Storages of tensors: what identifies one, and how many bytes it occupies."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from protrain.common.parameters import made_of
from protrain.common.trees import tensors_in

_CUDA_GRAIN_BYTES = 512  # CUDA's caching allocator rounds every allocation up to a multiple of this


def memory_in(tree: Any) -> list[Tensor]:
    """The plain tensors that all tensors in ``tree`` consist of. Each of them has a storage."""
    return [part for tensor in tensors_in(tree) for part in made_of(tensor).values()]


def storage_key(tensor: Tensor) -> StorageWeakRef:
    """An identifier for the storage of the plain ``tensor``.

    It is valid as long as the storage lives, and does not keep it alive.
    """
    return StorageWeakRef(tensor.untyped_storage())


def allocated_bytes(tensor: Tensor) -> int:
    """The bytes that the storage of ``tensor`` occupies on its device."""
    size = tensor.untyped_storage().nbytes()
    return -(-size // _CUDA_GRAIN_BYTES) * _CUDA_GRAIN_BYTES if tensor.is_cuda else size


def storages_in(tree: Any) -> dict[StorageWeakRef, int]:
    """The storages of all tensors in ``tree``, each with the bytes that it occupies on its device."""
    return {storage_key(tensor): allocated_bytes(tensor) for tensor in memory_in(tree)}
