"""The host arena: all host memory of the engine, exact to the page, pinned where transfers touch it.

Anonymous mappings (:mod:`protrain.common.host_memory`), handed out page by page. What is copied to or from a GPU is
registered with the CUDA driver when it is handed out, each piece on its own, as a copy must not cross from one
registration into another. torch's ``pin_memory`` rounds to powers of two and is several times slower to set up.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from protrain.common.host_memory import HostMapping


def aligned(count: int) -> int:
    """``count`` bytes rounded up to whole pages, which is what a piece of the arena occupies."""
    return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """Host memory in a few large segments, handed out from the front and never given back one by one.

    Args:
        device: what is taken is copied to and from it. Where that is a GPU it is pinned, and stays so as long as there
            are tensors on it, with the arena or without ([Note: who unpins] in protrain/common/host_memory.py).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = 0
        self._segments: list[_Segment] = []

    @property
    def pinned(self) -> bool:
        """Whether what is transferred is registered with the driver."""
        return self._device.type == "cuda"

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
            segment.mapping.pin(piece, self._device)
        return piece[: elements * dtype.itemsize].view(dtype)


class _Segment:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.mapping = HostMapping(size_bytes)
        self.memory = self.mapping.tensor()

    def take(self, count: int) -> Tensor:
        piece = self.memory[self.used_bytes : self.used_bytes + count]
        self.used_bytes += count
        return piece
