"""fp32 <-> (bf16 weight, int16 remainder), lossless.

    weight bits = (fp32 bits + 0x8000) >> 16            the upper half, rounded to nearest, with ties away from zero
    remainder   = fp32 bits - (weight bits << 16)       in [-32768, 32767]
    fp32 bits   = (weight bits << 16) + remainder       32-bit wrapping arithmetic

Every finite value and both infinities come back bit for bit. This includes values whose weight rounds to infinity,
where the remainder is below zero. Ties to even would lose values, because 65,537 fp32 values would share an even weight
and its 65,536 remainders. Every NaN becomes the one NaN (0x7FC0, 0). Rounded like a number, a NaN could become an
infinity or -0.

``split`` and ``join`` are plain torch, because they serve reading and saving states, not training steps. AdamW does the
same in its own pass, by ``split_bits`` and ``join_bits``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut an fp32 master into its bf16 weight and the int16 remainder that ``join`` needs.

    Args:
        master: float32 of any shape, on any device; unchanged.

    Returns:
        The weight and the remainder, of the master's shape.

    Raises:
        ValueError: the master has another type.
    """
    if master.dtype is not torch.float32:
        raise ValueError(f"master must be torch.float32, not {master.dtype}: cast it first")
    bits = master.view(torch.int32)
    upper = (bits + 0x8000).bitwise_right_shift_(16)
    nan = master.isnan()
    remainder = (bits - (upper << 16)).masked_fill_(nan, 0).to(torch.int16)
    weight = upper.masked_fill_(nan, 0x7FC0).to(torch.int16).view(torch.bfloat16)
    return weight, remainder


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 weight and its int16 remainder, of any shape: the inverse of ``split``.

    Raises:
        ValueError: a tensor has another type.
    """
    if (weight.dtype, remainder.dtype) != (torch.bfloat16, torch.int16):
        raise ValueError(f"weight and remainder must be bfloat16 and int16, not {weight.dtype} and {remainder.dtype}")
    return weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(remainder).view(torch.float32)


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
