"""The attention calls of a block: how many bytes each puts out, and how long each takes.

Each call is timed alone, with random values of the same shapes. Timing it inside the traced block would need a dispatch
mode, whose own overhead distorts the times of short kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from protrain.profiler.segments import elapsed_ms, finish, time_stamp
from protrain.profiler.storages import storages_in

_REPEATS = 3


@dataclass(frozen=True)
class _Described:
    """A tensor's shape, strides and type. Of integers also the values, which may say where sequences begin."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    values: tuple[Any, ...] = ()

    def filled(self, device: torch.device) -> Tensor:
        """Such a tensor, with random values if it is of floats. An expanded mask shares its memory as it did."""
        if not self.dtype.is_floating_point:
            return torch.tensor(self.values, dtype=self.dtype, device=device).view(self.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        filled = self.dtype if self.dtype.itemsize > 1 else torch.float32  # torch cannot draw random 8-bit values
        values = torch.empty(max(0, span), dtype=filled, device=device).normal_().to(self.dtype)
        return values.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention operator. Equal calls take equally long, so each is timed once."""

    operator: Any
    leaves: tuple[Any, ...]  # the arguments, with a description in place of each tensor
    tree: TreeSpec
    output_bytes: int
    flops: int

    def __hash__(self) -> int:
        return hash((self.operator, self.output_bytes, self.flops))


def attention_call(operator: Any, args: Any, kwargs: Any, outputs: Any, *, flops: int) -> AttentionCall:
    """Record a call of ``operator`` with its arguments and outputs."""
    leaves, tree = tree_flatten((args, kwargs))
    output_bytes = sum(storages_in(outputs).values())
    return AttentionCall(operator, tuple(map(_described, leaves)), tree, output_bytes, flops)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    values = () if leaf.is_floating_point() or leaf.is_meta else tuple(leaf.flatten().tolist())
    return _Described(leaf.shape, leaf.stride(), leaf.dtype, values)


def measured_ms(call: AttentionCall, device: torch.device) -> float:
    """The time of ``call`` on ``device``, in milliseconds."""
    leaves = [leaf.filled(device) if isinstance(leaf, _Described) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.tree)
    times = []
    with torch.no_grad():
        call.operator(*args, **kwargs)
        for _ in range(_REPEATS):
            start = time_stamp(device)
            call.operator(*args, **kwargs)
            end = time_stamp(device)
            finish(device)
            times.append(elapsed_ms(start, end))
    return median(times)
