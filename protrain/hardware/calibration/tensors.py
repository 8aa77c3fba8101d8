"""The tensors that calibration works on: random values, in host memory as the engine maps it or on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from protrain.common.host_memory import HostMapping, register

CPU = torch.device("cpu")
_RANDOM_BLOCK = 1 << 20  # elements that repeat, because drawing gigabytes of random numbers takes longer than measuring


def random_tensor(elements: int, dtype: torch.dtype, device: torch.device, *, positive: bool = False) -> Tensor:
    """A 1-d tensor of normal floats or uniform integers.

    On the host it lies in a ``HostMapping``, as in the engine. Zeros would cost less power and let the device clock
    higher, and a memory controller may treat them specially.
    """
    size = min(elements, _RANDOM_BLOCK)
    if dtype.is_floating_point:
        block = torch.randn(size, device=device)
        block = (block.abs() if positive else block).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        block = torch.randint(limits.min, limits.max + 1, (size,), dtype=dtype, device=device)
    tensor = (
        HostMapping(elements * dtype.itemsize).tensor().view(dtype)
        if device.type == "cpu"
        else torch.empty(elements, dtype=dtype, device=device)
    )
    for piece in tensor.split(_RANDOM_BLOCK):
        piece.copy_(block[: piece.numel()])
    return tensor


@contextlib.contextmanager
def pinned(*tensors: Tensor, device: torch.device) -> Iterator[bool]:
    """Register host ``tensors`` with the driver of ``device`` inside the context. Yields whether it accepted all.

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
