"""Host memory for model states, as the engine maps it and as calibration measures it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from protrain.quantities import format_bytes

_TOUCHED_BYTES = 64 * 1024**2  # by one thread at a time
_THREADS = 8


def map_host_memory(size_bytes: int) -> Tensor:
    """``size_bytes`` zeroed bytes on pages of their own, there already: a 1-d uint8 tensor.

    A private mapping, because only that has huge pages wherever they may be advised; those of a shared one are another
    setting of the system, off by default, and without them placing takes several times as long. Forked processes (a
    DataLoader's workers) do not inherit it: the first write after a fork would copy every page.

    Raises:
        MemoryError: the system has no such memory.
    """
    try:
        mapped = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise MemoryError(f"cannot map {format_bytes(size_bytes)} of host memory: {error}") from None
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):  # on Linux
            with contextlib.suppress(OSError):  # a kernel may be built without
                mapped.madvise(getattr(mmap, advice))
    memory = torch.frombuffer(mapped, dtype=torch.uint8)[:size_bytes]  # keeps the mapping
    # Page faults are taken here by many threads, not one by one inside the driver or the first step.
    with ThreadPoolExecutor(_THREADS) as pool:
        list(
            pool.map(lambda start: _touch(memory[start : start + _TOUCHED_BYTES]), range(0, size_bytes, _TOUCHED_BYTES))
        )
    return memory


def _touch(piece: Tensor) -> None:
    ctypes.memset(piece.data_ptr(), 0, piece.numel())
