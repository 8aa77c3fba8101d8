"""Collectives whose names torch 2.13 has changed, under one name."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``whole`` with the ``own`` tensors of all processes, in their order."""
    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single(whole, own, group=group)
    else:
        dist.all_gather_into_tensor(whole, own, group=group)


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``own`` with this process's part of the sum of all ``whole`` tensors."""
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(own, whole, group=group)
    else:
        dist.reduce_scatter_tensor(own, whole, group=group)
