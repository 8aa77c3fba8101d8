"""Calibration of the host: DRAM, AdamW by threads, and how fast memory is pinned."""

from __future__ import annotations

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from protrain.hardware.calibrate_timing import seconds
from protrain_kernels import adam, adam_scalars

_CPU = torch.device("cpu")
_TOUCHED_BYTES = 64 * 1024**2  # by one thread at a time
_TOUCH_THREADS = 8
STEP = adam_scalars(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, decoupled=True)


def map_host(count: int) -> Tensor:
    """``count`` zeroed bytes as the engine maps its host memory: huge pages advised, touched by many threads."""
    mapped = mmap.mmap(-1, max(count, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)[:count]
    with ThreadPoolExecutor(_TOUCH_THREADS) as pool:
        list(pool.map(lambda start: _touch(memory[start : start + _TOUCHED_BYTES]), range(0, count, _TOUCHED_BYTES)))
    return memory


def host_tensor(elements: int, dtype: torch.dtype) -> Tensor:
    """A zeroed 1-d tensor in host memory of :func:`map_host`."""
    return map_host(elements * dtype.itemsize).view(dtype)


def _touch(piece: Tensor) -> None:
    ctypes.memset(piece.data_ptr(), 0, piece.numel())


def dram_gbps(size: int, *, budget_s: float = 0.4) -> float:
    """What all of torch's threads move through the host's memory; ``size`` bytes a tensor, far more than its caches.

    The better of an update in place, which is what AdamW does, and a triad, whose written lines are read first.
    """
    one, other, third = (host_tensor(size // 4, torch.float32) for _ in range(3))
    update_s = seconds(lambda: one.mul_(0.5), _CPU, budget_s=budget_s / 2)
    triad_s = seconds(lambda: torch.add(third, one, alpha=0.5, out=other), _CPU, budget_s=budget_s / 2)
    return max(2 * size / update_s, 4 * size / triad_s) / 1e9


@dataclass(frozen=True)
class AdamChunk:
    """A chunk of model states with the split master, and its gradient."""

    weight: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor

    @classmethod
    def on_host(cls, elements: int) -> AdamChunk:
        """In mapped host memory; ``elements`` is a multiple of 128."""
        kinds = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
        chunk = cls(*(host_tensor(elements, kind) for kind in kinds))
        chunk.grad.fill_(1.0)
        return chunk

    @classmethod
    def on_device(cls, elements: int, device: torch.device) -> AdamChunk:
        """In device memory."""
        kinds = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
        chunk = cls(*(torch.zeros(elements, dtype=kind, device=device) for kind in kinds))
        chunk.grad.fill_(1.0)
        return chunk

    def update(self, threads: int = 0) -> None:
        """One AdamW step."""
        adam(self.weight, self.master, self.exp_avg, self.exp_avg_sq, self.grad, STEP, threads=threads)


def thread_counts(threads: int) -> list[int]:
    """What to try: powers of two up to ``threads``, and ``threads``, and two fewer, as beside a GPU."""
    powers = {1 << bit for bit in range(threads.bit_length()) if 1 << bit <= threads}
    return sorted(powers | {threads, max(1, threads - 2)})


def adam_gparams_by_threads(elements: int, threads: int, *, budget_s: float = 0.2) -> dict[int, float]:
    """Rate of host AdamW with the split master for every count of :func:`thread_counts`, 1e9 parameters a second."""
    chunk = AdamChunk.on_host(elements)
    return {
        count: elements / seconds(lambda count=count: chunk.update(count), _CPU, budget_s=budget_s) / 1e9
        for count in thread_counts(threads)
    }


def pinning_gbps(size: int) -> float | None:
    """How fast memory that was touched is registered with the CUDA driver; None when the driver refuses."""
    memory = map_host(size)
    start = time.perf_counter()
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    taken_s = time.perf_counter() - start
    if status != 0:
        return None
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    return size / taken_s / 1e9
