"""Calls of attention operators in a block: what they put out, and how long they take.

They are timed by themselves, with other values of the same shapes: marks inside a traced block would have to run as a
dispatch mode, whose own time is in the way where kernels are short.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
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
        values = torch.empty(max(0, span), dtype=self.dtype, device=device).normal_()
        return values.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Values:
    """A tensor of integers, whose values matter: where sequences begin."""

    key: int
    tensor: Tensor = field(compare=False)


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
    return _Shape(leaf.shape, leaf.stride(), leaf.dtype) if leaf.is_floating_point() else _Values(id(leaf), leaf)


def _filled(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, _Shape):
        return leaf.filled(device)
    return leaf.tensor if isinstance(leaf, _Values) else leaf


def _measured_ms(call: AttentionCall, device: torch.device) -> float:
    args, kwargs = tree_unflatten([_filled(leaf, device) for leaf in call.leaves], call.tree)
    call.operator(*args, **kwargs)
    times = []
    with torch.no_grad():
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
