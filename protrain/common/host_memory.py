"""Host memory for model states, as the engine maps it and as calibration measures it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

from protrain.common.quantities import format_bytes

_TOUCHED_BYTES = 64 * 1024**2  # by one thread at a time
_THREADS = 8


class HostMapping(mmap.mmap):
    """Zeroed bytes on pages of their own, there already, and what of them is pinned.

    [Note: who unpins] They are unpinned when the last tensor on them is gone, and not when their owner is. Whoever has
    a copy to or from them still to issue has a tensor, a thread that updates the last step's chunks while the model is
    dropped for example; a copy from memory that is unpinned meanwhile takes the process's whole CUDA context with it.

    A private mapping, because only that has huge pages wherever they may be advised; those of a shared one are another
    setting of the system, off by default, and without them placing takes several times as long. Forked processes (a
    DataLoader's workers) do not inherit it: the first write after a fork would copy every page. So their own memory may
    lie at these addresses, and there no mapping must ever end.

    Raises:
        MemoryError: the system has no such memory.
    """

    _pinned: list[tuple[int, torch.device]]  # addresses

    def __new__(cls, size_bytes: int) -> Self:
        """``size_bytes`` of it."""
        try:
            mapped = super().__new__(cls, -1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise MemoryError(f"cannot map {format_bytes(size_bytes)} of host memory: {error}") from None
        mapped._pinned = []
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):  # on Linux
                with contextlib.suppress(OSError):  # a kernel may be built without
                    mapped.madvise(getattr(mmap, advice))
        # Page faults are taken here by many threads, not one by one inside the driver or the first step.
        pieces = mapped.tensor().split(_TOUCHED_BYTES)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(_touch, pieces))
        _mappings.add(mapped)
        return mapped

    def tensor(self) -> Tensor:
        """All of it: 1-d, uint8. The tensor, and every view of it, keeps it."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def pin(self, piece: Tensor, device: torch.device) -> None:
        """Register ``piece``, a tensor on these bytes, with the CUDA driver, for copies to and from ``device``.

        Raises:
            MemoryError: the driver refuses.
        """
        status = register(piece, device)
        if status != 0:
            raise MemoryError(
                f"cannot pin {format_bytes(piece.numel())} of host memory (CUDA error {status}); "
                "pass a smaller host_memory"
            )
        self._pinned.append((piece.data_ptr(), device))

    def __del__(self) -> None:
        """Unpin. A weak reference's callback would come after the pages are gone."""
        pinned = getattr(self, "_pinned", [])  # there is none where the system refused
        if sys.is_finalizing():
            return
        try:
            for device in {device for _, device in pinned}:
                torch.cuda.synchronize(device)  # a copy may be on its way still
        finally:  # the pages go in any case, and the driver must not take others at their addresses for pinned
            for address, _ in pinned:
                torch.cuda.cudart().cudaHostUnregister(address)


_mappings: weakref.WeakSet[HostMapping] = weakref.WeakSet()


def _keep_for_good() -> None:
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_good)


def register(memory: Tensor, device: torch.device) -> int:
    """Pin ``memory`` for copies to and from ``device``: the CUDA driver's answer, 0 where it did."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status != 0:
        # The driver keeps the error for whoever asks next: the launch of a kernel that isn't at fault.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    return status


def map_host_memory(size_bytes: int) -> Tensor:
    """``size_bytes`` zeroed bytes on pages of their own, there already: a 1-d uint8 tensor. See :class:`HostMapping`.

    Raises:
        MemoryError: the system has no such memory.
    """
    return HostMapping(size_bytes).tensor()[:size_bytes]


def _touch(piece: Tensor) -> None:
    ctypes.memset(piece.data_ptr(), 0, piece.numel())
