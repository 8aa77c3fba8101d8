"""Collectives whose names torch 2.13 has changed, under one name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_gather(
    whole: Tensor, own: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Fill ``whole`` with the ``own`` tensors of all processes, in their order. Returns asynchronous work."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(whole, own, group=group, async_op=async_op)
    return work
