"""Copies bytes from pinned host memory to the device by a kernel, in its turn among other kernels.

A copy engine serves its copies first in, first out, whatever stream they come from. So the few bytes of a batch, copied
that way, would wait for all weights that are being uploaded, and the kernels behind them would wait as well. A kernel
reads host memory over the same link beside those copies.

Bytes: each is read once over the link and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import LAUNCH_OPTIONS, check_vector
from protrain_kernels.launch import launch

BLOCK = 1024  # words; a thread has four loads of 16 bytes in flight
PROGRAMS = 128  # 1 MiB is in flight, which a 64 GB/s link brings in 16 us: several times its latency


# No other code depends on the length being a multiple of something, so one kernel serves all lengths.
@triton.jit(do_not_specialize=["numel"])
def from_host_kernel(source: tl.tensor, target: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Every program copies the blocks whose turn is its own."""
    block = tl.program_id(0).to(tl.int64)
    while (block + 1) * BLOCK <= numel:  # loads without a mask are wide whatever the length
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + offsets, tl.load(source + offsets))
        block += tl.num_programs(0)
    if block * BLOCK < numel:
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + offsets, tl.load(source + offsets, mask=offsets < numel, other=0), mask=offsets < numel)


def launch_from_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Launch the Triton kernel on checked tensors, in words of 8 bytes where the bytes are whole aligned words."""
    words = all(tensor.data_ptr() % 8 == tensor.storage_offset() % 8 == 0 for tensor in (source, target))
    if words and source.numel() % 8 == 0:
        source, target = source.view(torch.int64), target.view(torch.int64)
    numel = source.numel()
    launch(
        from_host_kernel,
        min(PROGRAMS, -(-numel // BLOCK)),
        (source, target),
        numel,
        (),
        (BLOCK,),
        LAUNCH_OPTIONS,
        device_index=target.get_device(),
        on_host=(0,) if target.is_cuda else (),
    )


def from_host(
    source: torch.Tensor,  # [n] uint8 in pinned host memory
    target: torch.Tensor,  # [n] uint8, written
) -> None:
    """Copy bytes from pinned host memory to a device, on its current stream.

    Args:
        source: [n] uint8, contiguous. The caller keeps it unchanged until the kernel has run, because no allocator
            knows that the kernel reads it.
        target: [n] uint8, contiguous, on a GPU, or on the CPU, where this is a plain copy.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or the host memory is not pinned.
    """
    check_vector("source", source, dtypes=(torch.uint8,), device=torch.device("cpu"))
    check_vector("target", target, dtypes=(torch.uint8,), device=target.device, numel=source.numel())
    if source.numel() == 0:
        return
    if not target.is_cuda:
        target.copy_(source)
        return
    if not source.is_pinned():
        raise ValueError(f"source must be in pinned host memory for {target.device} to reach it: pass .pin_memory()")
    launch_from_host(source, target)
