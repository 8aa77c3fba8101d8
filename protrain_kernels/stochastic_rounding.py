"""Stochastic rounding of Adam's moments to bf16: up or down at random, so that nothing is lost on average.

    x      = bits(m) * 0x9E3779B1 + bits(v) + bits(fp32(step mod 2^24)) * 0x85EBCA6B
    random = hash(x)                                32 bits: lowbias32 of Chris Wellons' hash-prospector
    m      = upper half of (bits(m) + lower half of random)
    v      = upper half of (bits(v) + upper half of random)

All arithmetic is 32-bit and wraps. In x the bits of a NaN count as 0, because the machine chooses them. A value at a
share f of the way from one bf16 neighbour to the next becomes the one further from zero with probability f. Rounded to
nearest, it could stay where it is for good: with beta2 = 0.999 a variance falls by at most a thousandth of itself in a
step, and its neighbours in bf16 are 1/256 to 1/128 apart.

The random bits come from the values and the step, not from a generator or a place in memory. So kernels on any device,
in any layout and any number of pieces give the same result, and so does a step that is done again. The step is part of
x because a parameter without a gradient would otherwise meet the same bits in every step. It is taken modulo 2^24, up
to which fp32 represents every whole number. Beyond that, two or more steps in a row would have the same bits.

Zeros stay zeros. A value that bf16 represents does not change, so moments that are saved as fp32 and read back are the
same. Finite values stay finite: those beyond the largest bf16 become the largest bf16. A NaN becomes the NaN 0x7FC0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MASK = 0xFFFFFFFF


def round_moments_reference(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments, float32 of one shape, rounded to bfloat16, in plain torch on any device."""
    # In int64 nothing wraps by itself, and a shift to the right brings in no sign.
    m, v = (moment.view(torch.int32).to(torch.int64) & _MASK for moment in (exp_avg, exp_avg_sq))
    seed = int(torch.tensor(step, dtype=torch.float32, device="cpu").view(torch.int32)) * 0x85EBCA6B
    x = (m.masked_fill(exp_avg.isnan(), 0) * 0x9E3779B1 + v.masked_fill(exp_avg_sq.isnan(), 0) + (seed & _MASK)) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    x = x ^ (x >> 16)
    return _upper(m, x & 0xFFFF), _upper(v, x >> 16)


def _upper(bits: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + random.masked_fill(magnitude >= 0x7F7F0000, 0)) >> 16
    rounded = rounded.masked_fill(magnitude > 0x7F800000, 0x7FC0)
    return rounded.to(torch.int32).to(torch.int16).view(torch.bfloat16)


@triton.jit
def random_bits(m: tl.tensor, v: tl.tensor, step: tl.tensor) -> tl.tensor:
    """32 random bits from fp32 moments and the number of a step in fp32."""
    m_bits = tl.where(m == m, m.to(tl.uint32, bitcast=True), 0)
    v_bits = tl.where(v == v, v.to(tl.uint32, bitcast=True), 0)
    step_bits = (tl.zeros_like(m) + step).to(tl.uint32, bitcast=True)  # in the interpreter the step is a plain float
    x = m_bits * 0x9E3779B1 + v_bits + step_bits * 0x85EBCA6B
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def upper_half(value: tl.tensor, random: tl.tensor) -> tl.tensor:
    """The int16 bits of fp32 values that 16 random bits round to bf16."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + tl.where(magnitude >= 0x7F7F0000, 0, random)) >> 16
    return tl.where(magnitude > 0x7F800000, 0x7FC0, rounded).to(tl.int16)
