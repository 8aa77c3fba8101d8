"""Storages of tensors: what identifies one, and how many bytes it occupies."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_CUDA_GRAIN_BYTES = 512  # CUDA's caching allocator rounds every allocation up to a multiple of this


def storage_key(tensor: Tensor) -> StorageWeakRef:
    """An identifier for the storage of ``tensor``. It is valid as long as it lives, and does not keep the storage."""
    return StorageWeakRef(tensor.untyped_storage())


def allocated_bytes(tensor: Tensor) -> int:
    """The bytes that the storage of ``tensor`` occupies on its device."""
    size = tensor.untyped_storage().nbytes()
    return -(-size // _CUDA_GRAIN_BYTES) * _CUDA_GRAIN_BYTES if tensor.is_cuda else size
