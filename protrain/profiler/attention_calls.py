"""Calls of attention operators in a block: what they put out, and how long they take.

They are timed by themselves, with other values of the same shapes: marks inside a traced block would have to run as a
dispatch mode, whose own time is in the way where kernels are short.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

_CUDA_GRAIN_BYTES = 512  # the caching allocator's
_REPEATS = 3


@dataclass(frozen=True)
class _Shape:
    """A tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def filled(self, device: torch.device) -> Tensor:
        """A tensor like it, with random values; a mask may be expanded from fewer."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        filled = self.dtype if self.dtype.itemsize > 1 else torch.float32  # nothing fills 8 bits at random
        values = torch.empty(max(0, span), dtype=filled, device=device).normal_().to(self.dtype)
        return values.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Values:
    """A tensor of integers, whose values matter: where sequences begin."""

    shape: torch.Size
    dtype: torch.dtype
    values: tuple[Any, ...]

    def filled(self, device: torch.device) -> Tensor:
        """The same tensor."""
        return torch.tensor(self.values, dtype=self.dtype, device=device).view(self.shape)


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention operator; calls that are equal take equally long."""

    operator: Any
    leaves: tuple[Any, ...]  # of its arguments, tensors described
    tree: TreeSpec
    output_bytes: int
    flops: int

    def __hash__(self) -> int:
        return hash((self.operator, self.output_bytes, self.flops))


def attention_call(operator: Any, args: Any, kwargs: Any, outputs: Any, *, flops: int) -> AttentionCall:
    """The record of a call."""
    leaves, tree = tree_flatten((args, kwargs))
    storages = {
        leaf.untyped_storage()._cdata: allocated_bytes(leaf)
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, Tensor)
    }
    return AttentionCall(operator, tuple(map(_described, leaves)), tree, sum(storages.values()), flops)


def attention_times_ms(calls: Iterable[AttentionCall], device: torch.device) -> dict[AttentionCall, float]:
    """Milliseconds of each distinct call on ``device``."""
    return {call: _measured_ms(call, device) for call in set(calls)}


def allocated_bytes(tensor: Tensor) -> int:
    """What the storage of ``tensor`` takes of its device."""
    size = tensor.untyped_storage().nbytes()
    return -(-size // _CUDA_GRAIN_BYTES) * _CUDA_GRAIN_BYTES if tensor.is_cuda else size


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        return _Shape(leaf.shape, leaf.stride(), leaf.dtype)
    return _Values(leaf.shape, leaf.dtype, () if leaf.is_meta else tuple(leaf.flatten().tolist()))


def _measured_ms(call: AttentionCall, device: torch.device) -> float:
    leaves = [leaf.filled(device) if isinstance(leaf, _Shape | _Values) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.tree)
    times = []
    with torch.no_grad():
        call.operator(*args, **kwargs)
        for _ in range(_REPEATS):
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call.operator(*args, **kwargs)
                end.record()
                end.synchronize()
                times.append(float(start.elapsed_time(end)))
            else:
                begin = time.perf_counter()
                call.operator(*args, **kwargs)
                times.append((time.perf_counter() - begin) * 1e3)
    return median(times)
