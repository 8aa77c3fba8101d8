"""The host arena: all host memory of the engine, exact to the page, pinned where transfers touch it.

Anonymous mappings (:mod:`protrain.host_memory`), handed out page by page. What is copied to or from a GPU is
registered with the CUDA driver when it is handed out, each piece on its own, as a copy must not cross from one
registration into another. torch's ``pin_memory`` rounds to powers of two and is several times slower to set up.
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor

from protrain.host_memory import map_host_memory
from protrain.quantities import format_bytes


def aligned(count: int) -> int:
    """``count`` bytes rounded up to whole pages, which is what a piece of the arena occupies."""
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """Host memory in a few large segments, handed out from the front and never given back one by one."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.total_bytes = 0
        self._segments: list[_Segment] = []

    @property
    def free_bytes(self) -> int:
        """The largest piece that :meth:`take` hands out without mapping more memory."""
        return max((segment.size_bytes - segment.used_bytes for segment in self._segments), default=0)

    def reserve(self, count: int) -> None:
        """Map and touch ``count`` more bytes now, all at once. MemoryError when the system has no such memory."""
        if count > 0:
            segment = _Segment(aligned(count))
            self._segments.append(segment)
            self.total_bytes += segment.size_bytes

    def take(self, elements: int, dtype: torch.dtype, *, transferred: bool = True) -> Tensor:
        """A zeroed 1-d tensor of ``elements`` on pages of its own; maps more memory when the reserve is used up.

        ``transferred``: whether it is copied to or from the device, and is to be pinned if the arena is.
        """
        count = aligned(elements * dtype.itemsize)
        for segment in self._segments:
            if segment.size_bytes - segment.used_bytes >= count:
                break
        else:
            self.reserve(count)
            segment = self._segments[-1]
        piece = segment.take(count)
        if self.pinned and transferred:
            segment.pin(piece)
        return piece[: elements * dtype.itemsize].view(dtype)


class _Segment:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.memory = map_host_memory(size_bytes)
        self._pinned: list[int] = []
        weakref.finalize(self, _unpin, self._pinned)

    def take(self, count: int) -> Tensor:
        piece = self.memory[self.used_bytes : self.used_bytes + count]
        self.used_bytes += count
        return piece

    def pin(self, piece: Tensor) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
        if status != 0:
            raise MemoryError(
                f"cannot pin {format_bytes(piece.numel())} of host memory (CUDA error {status}); "
                "pass a smaller host_memory"
            )
        self._pinned.append(piece.data_ptr())


def _unpin(addresses: list[int]) -> None:
    if addresses:
        torch.cuda.synchronize()  # a copy may be on its way still
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
