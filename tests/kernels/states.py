"""States of Adam: random ones, copies where a kernel runs, and whether two have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from protrain_kernels import AdamStates, split


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


def check(found: AdamStates, expected: AdamStates, same_bits: Callable[..., None]) -> None:
    """Both have the same tensors, bit for bit."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            same_bits(ours, theirs)
