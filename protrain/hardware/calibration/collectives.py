"""Collectives of sharded chunks by size: NVLink, PCIe or network as the processes are connected; gloo on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from protrain.common.quantities import format_bytes
from protrain.hardware.calibration.ranks import Ranks
from protrain.hardware.calibration.timing import batch_s, figure_of
from protrain.hardware.profile import Figure

_WARMUP = 3
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 200


def all_gather(whole: Tensor, part: Tensor) -> None:
    """Gather every rank's ``part`` into ``whole``, under the name that this torch has for it."""
    if hasattr(dist, "all_gather_single"):  # 2.13 renamed it
        dist.all_gather_single(whole, part)
    else:
        dist.all_gather_into_tensor(whole, part)


def reduce_scatter(part: Tensor, whole: Tensor) -> None:
    """Add every rank's ``whole`` and leave each its ``part``, under the name that this torch has for it."""
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(part, whole)
    else:
        dist.reduce_scatter_tensor(part, whole)


def collective_figures(ranks: Ranks, size_bytes: int, *, budget_s: float) -> list[Figure]:
    """What one rank receives or sends a second when ``size_bytes`` in all are gathered, and reduced, in fp32."""
    elements = size_bytes // 4 // ranks.size
    part = torch.randn(elements, device=ranks.device)
    whole = torch.randn(elements * ranks.size, device=ranks.device)
    ways = {"all_gather": lambda: all_gather(whole, part), "reduce_scatter": lambda: reduce_scatter(part, whole)}
    moved = (ranks.size - 1) / ranks.size * whole.nbytes
    return [
        figure_of(
            name, _durations_s(run, ranks, budget_s=budget_s / 2), moved / 1e9, "GB/s", at=format_bytes(size_bytes)
        )
        for name, run in ways.items()
    ]


def _durations_s(run: Callable[[], None], ranks: Ranks, *, budget_s: float) -> list[float]:
    """Seconds of each of as many runs as ``budget_s`` holds; as many in every process, or they would wait for ever."""
    for _ in range(_WARMUP):
        run()
    wanted = budget_s / max(batch_s(run, ranks.device, 1), 1e-6)
    count = int(min(max(ranks.least([wanted])[0], _LEAST_SAMPLES), _MOST_SAMPLES))
    return [batch_s(run, ranks.device, 1) for _ in range(count)]
