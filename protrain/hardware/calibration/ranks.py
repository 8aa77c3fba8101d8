"""The processes that calibrate together, and their collectives.

All of them measure at the same time, and the slowest decides every figure.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from protrain.common.collectives import all_gather, reduce_scatter
from protrain.common.quantities import format_bytes
from protrain.hardware.cache import world_size
from protrain.hardware.calibration.timing import batch_s, figure_of
from protrain.hardware.profile import Contention, Figure

_WARMUP = 3
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 200


@dataclass(frozen=True)
class MeasuringRanks:
    """This process and the other processes of its run. It is alone when ``size`` is 1."""

    device: torch.device
    size: int

    @property
    def on_this_host(self) -> int:
        """How many processes share this machine's memory and cores."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def start_together(self) -> None:
        """Return when all processes have come here."""
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
        """The least of every share over the processes."""
        least = iter(self.least([share for group in groups for share in group.shares]))
        return [replace(group, shares=tuple(next(least) for _ in group.shares)) for group in groups]

    def union(self, lines: Sequence[str]) -> list[str]:
        """Every line that any process has, once."""
        if self.size == 1:
            return list(lines)
        everyone: list[Sequence[str]] = [()] * self.size
        dist.all_gather_object(everyone, list(lines))
        return list(dict.fromkeys(line for said in everyone for line in said))

    def agree(self, accepted: bool) -> bool:
        """Whether all processes were given what they asked for. They must go the same way, or would wait for ever."""
        return bool(self.least([float(accepted)])[0])

    def least(self, values: Sequence[float]) -> list[float]:
        """The least of each value over the processes."""
        if self.size == 1 or not values:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return [float(value) for value in shared.tolist()]

    def collective_figures(self, size_bytes: int, *, budget_s: float) -> list[Figure]:
        """Bytes a second that one rank receives or sends when ``size_bytes`` of fp32 in all are gathered or reduced."""
        elements = size_bytes // 4 // self.size
        part = torch.randn(elements, device=self.device)
        whole = torch.randn(elements * self.size, device=self.device)
        ways = {"all_gather": lambda: all_gather(whole, part), "reduce_scatter": lambda: reduce_scatter(part, whole)}
        moved = (self.size - 1) / self.size * whole.nbytes
        return [
            figure_of(name, self._durations_s(run, budget_s / 2), moved / 1e9, "GB/s", at=format_bytes(size_bytes))
            for name, run in ways.items()
        ]

    def _durations_s(self, run: Callable[[], object], budget_s: float) -> list[float]:
        """Seconds of each of as many runs as ``budget_s`` holds.

        Every process makes the same number of runs, because they would wait for each other for ever otherwise.
        """
        for _ in range(_WARMUP):
            run()
        wanted = budget_s / max(batch_s(run, self.device, 1), 1e-6)
        count = int(min(max(self.least([wanted])[0], _LEAST_SAMPLES), _MOST_SAMPLES))
        return [batch_s(run, self.device, 1) for _ in range(count)]


@contextlib.contextmanager
def ranks_of_this_run(device: torch.device) -> Iterator[MeasuringRanks]:
    """The processes that torchrun started. Where there is no process group, one exists inside the context."""
    size = world_size()
    if size == 1 or dist.is_initialized():
        yield MeasuringRanks(device, size)
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield MeasuringRanks(device, size)
    finally:
        dist.destroy_process_group()
