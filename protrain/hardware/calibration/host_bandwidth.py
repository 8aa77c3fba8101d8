"""Host memory as the engine maps it, filled with random values, and its bandwidth."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from protrain.common.host_memory import map_host_memory, register
from protrain.hardware.calibration.timing import durations_s, figure_of
from protrain.hardware.profile import Figure

CPU = torch.device("cpu")
_RANDOM_BLOCK = 1 << 20  # elements that repeat: drawing gigabytes of random numbers would take longer than measuring


def fill_random(tensor: Tensor, *, positive: bool = False, scale: float = 1.0) -> Tensor:
    """Fill a 1-d ``tensor`` in place: normal floats, uniform integers. Returns it.

    Zeros would cost less power, hence clock faster, and a memory controller may treat them specially.
    """
    size = min(tensor.numel(), _RANDOM_BLOCK)
    if tensor.dtype.is_floating_point:
        block = torch.randn(size, device=tensor.device) * scale
        block = (block.abs() if positive else block).to(tensor.dtype)
    else:
        limits = torch.iinfo(tensor.dtype)
        block = torch.randint(limits.min, limits.max + 1, (size,), dtype=tensor.dtype, device=tensor.device)
    for first in range(0, tensor.numel(), _RANDOM_BLOCK):
        piece = tensor[first : first + _RANDOM_BLOCK]
        piece.copy_(block[: piece.numel()])
    return tensor


def random_tensor(elements: int, dtype: torch.dtype, device: torch.device, *, positive: bool = False) -> Tensor:
    """A random 1-d tensor: in memory of :func:`protrain.common.host_memory.map_host_memory` on the host."""
    empty = (
        map_host_memory(elements * dtype.itemsize).view(dtype)
        if device.type == "cpu"
        else torch.empty(elements, dtype=dtype, device=device)
    )
    return fill_random(empty, positive=positive)


def dram_figures(size_bytes: int, *, budget_s: float) -> list[Figure]:
    """What torch's threads move through the host's memory; ``size_bytes`` a tensor, far more than the caches.

    By an update in place, which is what AdamW does, and by a triad, whose written lines are read first.
    """
    one, other, third = (random_tensor(size_bytes // 4, torch.float32, CPU) for _ in range(3))
    update = durations_s(lambda: one.mul_(1.0), CPU, budget_s=budget_s / 2)
    triad = durations_s(lambda: torch.add(third, one, alpha=0.5, out=other), CPU, budget_s=budget_s / 2)
    return [
        figure_of("host DRAM", update, 2 * size_bytes / 1e9, "GB/s", at="update in place"),
        figure_of("host DRAM", triad, 4 * size_bytes / 1e9, "GB/s", at="triad"),
    ]


@contextlib.contextmanager
def pinned(*tensors: Tensor, device: torch.device) -> Iterator[bool]:
    """Register host ``tensors`` with the driver of ``device`` inside the context; whether it accepted all of them.

    On a CPU there is nothing to do.
    """
    if device.type != "cuda":
        yield True
        return
    registered: list[int] = []
    accepted = True
    try:
        for tensor in tensors:
            if register(tensor, device) != 0:
                accepted = False
                break
            registered.append(tensor.data_ptr())
        yield accepted
    finally:
        torch.cuda.synchronize(device)
        for address in registered:
            torch.cuda.cudart().cudaHostUnregister(address)
