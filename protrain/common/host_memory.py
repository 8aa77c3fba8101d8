"""Host memory for model states. The engine and calibration both map it with the functions here."""

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

from protrain.common.tables import format_bytes

_TOUCHED_BYTES = 64 * 1024**2  # one thread touches this many bytes at a time
_THREADS = os.cpu_count() or 8


class HostMapping(mmap.mmap):
    """Zeroed, page-aligned host memory whose pages are already present, with a record of which parts are pinned.

    [Note: who unpins] Memory is unpinned when the last tensor on it is gone, not when its owner is. Whoever still has
    to issue a copy to or from the memory holds such a tensor: for example a thread that updates the last step's chunks
    while the model is being dropped. A copy from memory that was unpinned meanwhile would destroy the process's whole
    CUDA context.

    The mapping is private, because only private memory has huge pages wherever they may be advised. Huge pages of
    shared memory depend on another system setting, which is off by default, and without them touching the pages takes
    several times as long. Forked processes, such as a DataLoader's workers, do not inherit the mapping, because the
    first write after a fork would copy every page. So a child's own memory may lie at these addresses, and in a child
    the mapping must never be unmapped.

    Raises:
        MemoryError: the system has no such memory.
    """

    _size_bytes: int  # may be 0, which the system does not map
    _pinned: list[tuple[int, torch.device]]  # the address and device of every pinned piece

    def __new__(cls, size_bytes: int) -> Self:
        """Map ``size_bytes``."""
        try:
            mapped = super().__new__(cls, -1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise MemoryError(f"cannot map {format_bytes(size_bytes)} of host memory: {error}") from None
        mapped._size_bytes, mapped._pinned = size_bytes, []
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):  # only Linux has these
                with contextlib.suppress(OSError):  # a kernel may be built without them
                    mapped.madvise(getattr(mmap, advice))
        # Many threads take the page faults here. Otherwise one thread would take them, inside the driver or the first
        # step.
        pieces = mapped.tensor().split(_TOUCHED_BYTES)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(_touch, pieces))
        _mappings.add(mapped)
        return mapped

    def tensor(self) -> Tensor:
        """All of the memory as a 1-d uint8 tensor. The tensor, and every view of it, keeps the memory alive."""
        return torch.frombuffer(self, dtype=torch.uint8)[: self._size_bytes]

    def pin(self, piece: Tensor, device: torch.device) -> bool:
        """Register ``piece``, a tensor on this memory, with the CUDA driver for copies to and from ``device``.

        Returns False if the driver refuses. It then takes every copy through pinned memory of its own.
        """
        accepted = register(piece, device) == 0
        if accepted:
            self._pinned.append((piece.data_ptr(), device))
        return accepted

    def __del__(self) -> None:
        """Unpin. The callback of a weak reference would come too late, after the pages are gone."""
        pinned = getattr(self, "_pinned", [])  # it does not exist if the system refused the memory
        if sys.is_finalizing():
            return
        try:
            for device in {device for _, device in pinned}:
                torch.cuda.synchronize(device)  # a copy may still be running
        finally:  # the pages go in any case, and the driver must not take other memory at their addresses for pinned
            for address, _ in pinned:
                torch.cuda.cudart().cudaHostUnregister(address)


_mappings: weakref.WeakSet[HostMapping] = weakref.WeakSet()


def _keep_for_good() -> None:
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_keep_for_good)


def register(memory: Tensor, device: torch.device) -> int:
    """Pin ``memory`` for copies to and from ``device``. Returns the CUDA driver's status, which is 0 on success."""
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status != 0:
        # The driver keeps the error and would report it at the next kernel launch, which is not at fault.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    return status


def _touch(piece: Tensor) -> None:
    ctypes.memset(piece.data_ptr(), 0, piece.numel())
