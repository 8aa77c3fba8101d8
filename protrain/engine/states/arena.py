"""The host arena: all host memory of the engine, exact to the page, pinned where transfers touch it.

The arena consists of anonymous mappings (``protrain.common.host_memory``), which it hands out page by page. A piece
that is copied to or from a GPU is registered with the CUDA driver when it is handed out. Each piece is registered by
itself, because a copy must not cross from one registration into another. torch's ``pin_memory`` rounds sizes up to
powers of two and takes several times longer.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from protrain.common.errors import warn_user
from protrain.common.host_memory import HostMapping
from protrain.distributed.ranks import Ranks
from protrain.engine.streams import Streams

UNPINNED = (
    "the driver refuses to pin host memory, so that copies to and from the GPU are slow and nothing overlaps them: "
    "raise the limit of locked memory (ulimit -l, --ulimit memlock=-1 of a container, memory= in WSL's "
    ".wslconfig), or pass a smaller host_memory"
)


def whole_pages(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole pages: the bytes that a piece of the arena occupies."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """Host memory in a few large segments, handed out from the front and never given back piece by piece.

    Args:
        device: the device that the memory is copied to and from. Memory for a GPU is pinned, and stays pinned as long
            as there are tensors on it, with the arena or without ([Note: who unpins] in
            protrain/common/host_memory.py).

    The driver may refuse to pin memory, in WSL and in containers above all. Training then goes on with a warning: a
    copy of such memory is right, but it is slow, and the thread that asks for it waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = 0
        self.all_pinned = True  # all that was to be pinned
        self._segments: list[_Segment] = []

    @property
    def free_bytes(self) -> int:
        """The size of the largest piece that ``take`` can hand out without mapping more memory."""
        return max((segment.free_bytes for segment in self._segments), default=0)

    def reserve(self, size_bytes: int) -> None:
        """Map and touch ``size_bytes`` more at once. MemoryError when the system has no such memory."""
        if size_bytes > 0:
            mapping = HostMapping(whole_pages(size_bytes))
            with torch.inference_mode(False):  # what is made in inference mode cannot be written outside of it
                self._segments.append(_Segment(mapping, mapping.tensor()))
            self.total_bytes += whole_pages(size_bytes)

    def take(self, elements: int, dtype: torch.dtype, *, transferred: bool = True) -> Tensor:
        """A 1-d tensor of ``elements`` zeros on pages of its own. Maps more memory when the reserve is used up.

        ``transferred`` says whether the tensor is copied to or from the device, so that it must be pinned for a GPU.
        """
        size_bytes = elements * dtype.itemsize
        occupied_bytes = whole_pages(size_bytes)
        if occupied_bytes > self.free_bytes:
            self.reserve(occupied_bytes)
        segment = next(each for each in self._segments if each.free_bytes >= occupied_bytes)
        piece = segment.memory[segment.used_bytes : segment.used_bytes + occupied_bytes]
        segment.used_bytes += occupied_bytes
        if transferred and self._device.type == "cuda" and not segment.mapping.pin(piece, self._device):
            if self.all_pinned:
                warn_user(UNPINNED)
            self.all_pinned = False
        return piece[:size_bytes].view(dtype)


@dataclass(eq=False)
class _Segment:
    mapping: HostMapping
    memory: Tensor  # bytes
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.memory.nbytes - self.used_bytes


class ActivationBytes(NamedTuple):
    """Device memory that forward and backward of the planned batch may take, by the memory model."""

    as_planned: int
    all_recomputed: int  # if every block is recomputed, and nothing offloaded


@dataclass(kw_only=True)
class EngineMemory:
    """Where the tensors of one engine lie and how they are copied: what all of its parts allocate with."""

    device: torch.device
    dtype: torch.dtype  # of weights and gradients
    streams: Streams
    arena: Arena
    ranks: Ranks  # the processes that train together
    free_device_bytes: int  # what the plan leaves of the limit of device memory
    activations: ActivationBytes
    host_bytes: int  # the limit of host memory
    sum_factor: float = 1.0  # on the sum of the gradients of all ranks: 1 / ranks for their mean
    poison: bool = False  # fill released device memory with NaN, so that a use of it shows
    zeros_bytes: int = field(default=0, init=False)  # of all that ``zeros`` has made

    @property
    def free_host_bytes(self) -> int:
        """What the arena leaves of the limit of host memory."""
        return max(0, self.host_bytes - self.arena.total_bytes)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Device memory that lives as long as the engine, recorded for all streams. By default it has its ``dtype``."""
        made = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        self.zeros_bytes += made.nbytes
        return self.streams.record_streams(made)
