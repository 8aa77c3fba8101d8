"""The rates of device and host by themselves: matrix products, device memory, host memory, and the kernels of a step.

The kernels move the gradients of a transformer block into a chunk, and its activations into a buffer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from protrain.hardware.calibration.tensors import CPU, random_tensor
from protrain.hardware.calibration.timing import Effort, batch_s, durations_s, rate
from protrain_kernels import flatten, pack, padded, tiles

_SETTLED = 0.02  # the relative difference of two windows that agree
_WINDOW_S = 0.25
_MOST_WINDOWS = 12
_LONGEST_PRODUCT_S = 0.1  # of which calibration makes several hundred
_LEAST_WIDTH = 256


class Products:
    """Square matrix products: bf16 on a GPU, fp32 on a CPU. On a slow device they are smaller than usual."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        if device.type == "cuda":
            self.width = 8192 if effort.size > 0.25 else 4096
        else:
            self.width = 1024 if effort.size > 0.25 else 256
        self._make()
        while self.width > _LEAST_WIDTH and self._takes_long():
            self.width //= 2
            self._make()

    def _make(self) -> None:
        """Make the matrices. Those before are given back first."""
        self._left = self._right = self._out = torch.empty(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._left, self._right = (
            random_tensor(self.width**2, dtype, self.device).view(self.width, self.width) for _ in range(2)
        )
        self._out = torch.empty_like(self._left)

    def _takes_long(self) -> bool:
        self.run()  # loads the kernel
        return batch_s(self.run, self.device, 1) > _LONGEST_PRODUCT_S

    def run(self, count: int = 1) -> None:
        """Queue ``count`` products."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def settle(self, *, time_share: float) -> None:
        """Compute until two windows in a row agree, because a cold card clocks higher than it does in a long run.

        Args:
            time_share: the share of the usual window of a quarter of a second.
        """
        before = 0.0
        for _ in range(_MOST_WINDOWS):
            now = statistics.median(durations_s(self.run, self.device, budget_s=_WINDOW_S * time_share))
            if abs(now - before) < _SETTLED * now:
                return
            before = now

    def tflops(self, *, budget_s: float) -> float:
        """The rate of the products."""
        return rate(self.run, self.device, 2 * self.width**3 / 1e12, budget_s=budget_s)


def copy_gbps(device: torch.device, size_bytes: int, *, budget_s: float) -> float:
    """Bytes a second that a copy or an elementwise kernel reads and writes, whichever is faster."""
    source, target = (random_tensor(size_bytes // 4, torch.float32, device) for _ in range(2))
    ways: list[Callable[[], object]] = [lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target)]
    return max(rate(run, device, 2 * size_bytes / 1e9, budget_s=budget_s / 2) for run in ways)


def dram_gbps(size_bytes: int, *, budget_s: float) -> float:
    """What torch's threads move through the host's memory, with tensors of ``size_bytes``, far beyond the caches.

    It is the better of an update in place, which is what AdamW does, and a triad, whose written lines are read first.
    """
    one, other, third = (random_tensor(size_bytes // 4, torch.float32, CPU) for _ in range(3))
    ways: list[tuple[Callable[[], object], int]] = [
        (lambda: one.mul_(1.0), 2 * size_bytes),
        (lambda: torch.add(third, one, alpha=0.5, out=other), 4 * size_bytes),
    ]
    return max(rate(run, CPU, moved / 1e9, budget_s=budget_s / 2) for run, moved in ways)


def _random(device: torch.device, *shape: int) -> Tensor:
    return random_tensor(math.prod(shape), torch.bfloat16, device).view(shape)


def flatten_gbps(device: torch.device, hidden: int, *, budget_s: float) -> float:
    """Bytes a second that ``flatten`` with squares reads and writes, on the bf16 gradients of a LLaMA block."""
    wide = hidden * 7 // 2 // 128 * 128
    shapes = [(hidden, hidden)] * 2 + [(hidden // 4, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
    gradients = [_random(device, *shape) for shape in shapes] + [_random(device, hidden) for _ in range(2)]
    *offsets, end = accumulate((padded(gradient.numel()) for gradient in gradients), initial=0)
    *starts, partials = accumulate((tiles(gradient.numel()) for gradient in gradients), initial=0)
    chunk = torch.empty(end, dtype=torch.bfloat16, device=device)
    squares = torch.empty(partials, dtype=torch.float32, device=device)

    def run() -> None:
        flatten(gradients, chunk, offsets, squares, starts)

    moved = sum(gradient.nbytes for gradient in gradients) + chunk.nbytes
    return rate(run, device, moved / 1e9, budget_s=budget_s)


def pack_gbps(device: torch.device, hidden: int, *, budget_s: float) -> float:
    """Bytes a second that ``pack`` reads and writes, on what a block of 4096 tokens saves, with views and a mask."""
    tokens = hidden
    fused = _random(device, tokens, 3 * hidden)
    saved = [
        *(_random(device, tokens, hidden) for _ in range(6)),
        *fused.split(hidden, dim=1),
        *(_random(device, tokens, 7 * hidden // 2) for _ in range(2)),
        _random(device, tokens, hidden) > 0,
    ]
    return rate(lambda: pack(saved), device, 2 * pack(saved).buffer.nbytes / 1e9, budget_s=budget_s)
