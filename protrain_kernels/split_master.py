"""fp32 <-> (bf16 weight, int16 remainder), lossless.

    weight bits = (fp32 bits + 0x8000) >> 16            the upper half, rounded to nearest, with ties away from zero
    remainder   = fp32 bits - (weight bits << 16)       in [-32768, 32767]
    fp32 bits   = (weight bits << 16) + remainder       32-bit wrapping arithmetic

Every finite value and both infinities come back bit for bit. This includes values whose weight rounds to infinity,
where the remainder is below zero. Ties to even would lose values, because 65,537 fp32 values would share an even weight
and its 65,536 remainders. Every NaN becomes the one NaN (0x7FC0, 0). Rounded like a number, a NaN could become an
infinity or -0.

Bytes: 4 are read and 4 written per element, in either direction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import LAUNCH_OPTIONS, check_apart, check_vector
from protrain_kernels.host_kernels import host_join, host_split
from protrain_kernels.launch import launch

BLOCK = 1024


def split_reference(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``split`` in plain torch, for any shape and device."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    nan = master.isnan()
    remainder = (bits - (upper << 16)).masked_fill_(nan, 0).to(torch.int16)
    weight = upper.masked_fill_(nan, 0x7FC0).to(torch.int16).view(torch.bfloat16)
    return weight, remainder


def join_reference(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """``join`` in plain torch, for any shape and device."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


@triton.jit
def widen(value: tl.tensor) -> tl.tensor:
    """Loaded fp16 values, fp32 values or bf16 bits in fp32."""
    if value.dtype == tl.int16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def split_bits(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The weight bits and the remainders of fp32 values, both int16."""
    bits = value.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    nan = value != value
    remainder = tl.where(nan, 0, bits - (upper << 16))
    return tl.where(nan, 0x7FC0, upper).to(tl.int16), remainder.to(tl.int16)


@triton.jit
def join_bits(weight: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """The fp32 values of int16 weight bits and remainders."""
    return ((weight.to(tl.int32) << 16) + remainder.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def split_kernel(
    master: tl.tensor, weight: tl.tensor, remainder: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program splits BLOCK elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    upper, lower = split_bits(tl.load(master + offsets, mask=mask))
    tl.store(weight + offsets, upper, mask=mask)
    tl.store(remainder + offsets, lower, mask=mask)


@triton.jit
def join_kernel(
    weight: tl.tensor, remainder: tl.tensor, master: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program joins BLOCK elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    value = join_bits(tl.load(weight + offsets, mask=mask), tl.load(remainder + offsets, mask=mask))
    tl.store(master + offsets, value, mask=mask)


def _check(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    device, numel = master.device, master.numel()
    check_vector("master", master, dtypes=(torch.float32,), device=device)
    check_vector("weight", weight, dtypes=(torch.bfloat16,), device=device, numel=numel)
    check_vector("remainder", remainder, dtypes=(torch.int16,), device=device, numel=numel)
    check_apart({"master": master, "weight": weight, "remainder": remainder})


def launch_split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Launch the Triton kernel of ``split``."""
    _launch(split_kernel, (master, weight, remainder))


def launch_join(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Launch the Triton kernel of ``join``."""
    _launch(join_kernel, (weight, remainder, master))


def _launch(kernel: object, tensors: tuple[torch.Tensor, ...]) -> None:
    numel, index = tensors[0].numel(), tensors[0].get_device()
    launch(kernel, -(-numel // BLOCK), tensors, numel, (), (BLOCK,), LAUNCH_OPTIONS, device_index=index)


def split(
    master: torch.Tensor,  # [n] float32
    weight: torch.Tensor | None = None,  # [n] bfloat16, written
    remainder: torch.Tensor | None = None,  # [n] int16, written
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut an fp32 master into its bf16 weight and the int16 remainder that ``join`` needs.

    Args:
        master: [n] float32, contiguous; unchanged.
        weight: [n] bfloat16 to write into, or None to make it.
        remainder: [n] int16 to write into, or None to make it.

    Returns:
        The weight and the remainder.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    weight = torch.empty_like(master, dtype=torch.bfloat16) if weight is None else weight
    remainder = torch.empty_like(master, dtype=torch.int16) if remainder is None else remainder
    _check(master, weight, remainder)
    if master.numel() == 0:
        return weight, remainder
    if master.is_cuda:
        launch_split(master, weight, remainder)
    elif not host_split(master, weight, remainder):
        upper, lower = split_reference(master)
        weight.copy_(upper)
        remainder.copy_(lower)
    return weight, remainder


def join(
    weight: torch.Tensor,  # [n] bfloat16
    remainder: torch.Tensor,  # [n] int16
    master: torch.Tensor | None = None,  # [n] float32, written
) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its remainder: the inverse of ``split``.

    Args:
        weight: [n] bfloat16, contiguous; unchanged.
        remainder: [n] int16, contiguous; unchanged.
        master: [n] float32 to write into, or None to make it.

    Returns:
        The master.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    master = torch.empty_like(weight, dtype=torch.float32) if master is None else master
    _check(master, weight, remainder)
    if master.numel() == 0:
        return master
    if master.is_cuda:
        launch_join(weight, remainder, master)
    elif not host_join(weight, remainder, master):
        master.copy_(join_reference(weight, remainder))
    return master
