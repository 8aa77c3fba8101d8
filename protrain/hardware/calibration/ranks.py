"""The processes that calibrate together: they measure at the same time, and the slowest decides every figure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from protrain.hardware.cache import world_size
from protrain.hardware.profile import Contention, Figure


@dataclass(frozen=True)
class Ranks:
    """This process and the others of its run; alone when ``size`` is 1."""

    device: torch.device
    size: int

    @property
    def on_this_host(self) -> int:
        """How many of them share this machine's memory and cores."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def start_together(self) -> None:
        """Return when all have come here."""
        if self.size > 1:
            dist.barrier()

    def slowest(self, figures: Sequence[Figure]) -> list[Figure]:
        """The least of every rate over the processes, which have measured the same figures."""
        least = self.least([rate for each in figures for rate in (each.median, each.p20, each.p80, each.long_run)])
        fours = zip(*(least[first::4] for first in range(4)), strict=True)
        return [
            replace(figure, median=median, p20=p20, p80=p80, mean=mean)
            for figure, (median, p20, p80, mean) in zip(figures, fours, strict=True)
        ]

    def most_contended(self, groups: Sequence[Contention]) -> list[Contention]:
        """The least of every share."""
        least = iter(self.least([share for group in groups for share in group.shares]))
        return [replace(group, shares=tuple(next(least) for _ in group.shares)) for group in groups]

    def union(self, lines: Sequence[str]) -> list[str]:
        """What any of them said, once."""
        if self.size == 1:
            return list(lines)
        everyone: list[Sequence[str]] = [()] * self.size
        dist.all_gather_object(everyone, list(lines))
        return list(dict.fromkeys(line for said in everyone for line in said))

    def agree(self, accepted: bool) -> bool:
        """Whether all of them were given what they asked for: they must all go the same way, or wait for ever."""
        return bool(self.least([float(accepted)])[0])

    def least(self, values: Sequence[float]) -> list[float]:
        """The least of each value over the processes."""
        if self.size == 1 or not values:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return [float(value) for value in shared.tolist()]


@contextlib.contextmanager
def ranks_of_this_run(device: torch.device) -> Iterator[Ranks]:
    """The processes that torchrun started; makes a process group for the time being where there is none."""
    size = world_size()
    if size == 1 or dist.is_initialized():
        yield Ranks(device, size)
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield Ranks(device, size)
    finally:
        dist.destroy_process_group()
