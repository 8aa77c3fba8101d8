"""Random values, states of Adam with copies where a kernel runs, a step, and whether two tensors have the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain_kernels import AdamStates, adam_scalars, split

BF16, FP16, FP32 = TYPES = torch.bfloat16, torch.float16, torch.float32
MOMENTS = pytest.mark.parametrize("moment_dtype", [FP32, BF16], ids=["moments", "bfloat16-moments"])
SCALARS = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, decoupled=True)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def states_of(
    values: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    dtype: torch.dtype,
    moment_dtype: torch.dtype = torch.float32,
) -> AdamStates:
    """The states of a weight of ``dtype`` that is made from fp32 ``values``."""
    weight, master = values.to(dtype, copy=True), None
    if dtype is torch.bfloat16:
        weight, master = split(values)
    elif dtype is torch.float16:
        master = values.clone()
    return AdamStates(weight, master, exp_avg.to(moment_dtype, copy=True), exp_avg_sq.to(moment_dtype, copy=True))


def random_states(count: int, dtype: torch.dtype, moment_dtype: torch.dtype = torch.float32) -> AdamStates:
    """States of ``count`` normal values."""
    values, exp_avg, root = torch.randn(3, count, generator=torch.Generator().manual_seed(count)).unbind()
    return states_of(values, exp_avg, root.square(), dtype, moment_dtype)


def copied(states: AdamStates, device: torch.device | str = "cpu") -> AdamStates:
    """A copy on ``device``, as each implementation must have its own to change."""
    copies: Any = [None if state is None else state.to(device, copy=True) for state in states]
    return AdamStates(*copies)


def check(found: AdamStates, expected: AdamStates) -> None:
    """Both have the same tensors, bit for bit."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            same_bits(ours, theirs)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal bits, so that -0 isn't 0; any NaN equals any other, since machines choose its payload."""
    found, expected = found.cpu(), expected.cpu()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    integers = _INTEGERS[found.element_size()]
    differ = found.view(integers) != expected.view(integers)
    if found.is_floating_point():
        differ &= ~(found.isnan() & expected.isnan())
    where = differ.nonzero().flatten().tolist()
    assert not where, f"{len(where)} differ, first at {where[0]}: {found[where[0]]} != {expected[where[0]]}"


def any_bits(seed: int, count: int) -> torch.Tensor:
    """fp32 of random bit patterns, with subnormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    special = [0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38, torch.inf, -torch.inf, torch.nan]
    values = bits.view(torch.float32)
    values[: len(special)] = torch.tensor(special)
    return values


def every_half(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of a type of 16 bits."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def boundaries(dtype: torch.dtype) -> torch.Tensor:
    """fp32 values on and beside every rounding boundary between two positive neighbours of ``dtype``."""
    halves = every_half(dtype)[1 << 15 :].float()
    bits = ((halves[:-1] + halves[1:]) / 2).view(torch.int32)
    return torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)])
