"""What several ranks measure: the collectives of a step, and everything else as one, of which the slowest decides.

Collectives go by the calls and through the communicators that training uses. Ranks gather the weights of a chunk, and
exchange its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from protrain.common.tables import format_bytes
from protrain.distributed.ranks import Ranks
from protrain.hardware.calibration.tensors import random_tensor
from protrain.hardware.calibration.timing import batch_s, figure_of
from protrain.hardware.profile import Contention, Figure

_WHAT = "the timing of collectives"
_WARM_UP = 3
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 200
_MARGIN = 1.5  # so much longer than a measurement collectives go on, as others should not run alone at its end


class Collectives:
    """A tensor that ranks gather and exchange. All of them must use it in the same way.

    Args:
        ranks: several, which use the device.
        device: of this rank.
        size_bytes: the size of the whole tensor, of which each rank has a part.
    """

    def __init__(self, ranks: Ranks, device: torch.device, size_bytes: int) -> None:
        self._ranks = ranks
        self._device = device
        self._whole = random_tensor(self._divisible(size_bytes), torch.uint8, device)
        self._received = torch.empty_like(self._whole)
        self._both_s: float | None = None

    def _divisible(self, size_bytes: int) -> int:
        return size_bytes // self._ranks.size * self._ranks.size

    def gather(self, size_bytes: int) -> None:
        """Queue a gather of ``size_bytes`` in all."""
        self._ranks.gather(self._whole[: self._divisible(size_bytes)], _WHAT)

    def exchange(self, size_bytes: int) -> None:
        """Queue an exchange of ``size_bytes`` of each rank, of which the other ranks get their parts."""
        whole = self._divisible(size_bytes)
        counts = [whole // self._ranks.size] * self._ranks.size
        self._ranks.exchange(self._received[:whole], self._whole[:whole], counts, _WHAT)

    def both(self) -> None:
        """Queue a gather and an exchange of the whole tensor."""
        self.gather(self._whole.nbytes)
        self.exchange(self._whole.nbytes)

    def units_in(self, seconds: float) -> int:
        """How many times all ranks are to do ``both``, so that it takes longer than ``seconds``."""
        if self._both_s is None:
            self.both()
            self._both_s = max(self._ranks.all_values(batch_s(self.both, self._device, _WARM_UP), _WHAT))
        return math.ceil(_MARGIN * seconds / self._both_s)

    def figures(self, size_bytes: int, *, budget_s: float) -> list[Figure]:
        """The rates of a gather and of an exchange: the bytes that a rank receives from others, or sends to them."""
        whole = self._divisible(size_bytes)
        moved = whole - whole // self._ranks.size
        ways = {"all_gather": lambda: self.gather(whole), "all_to_all": lambda: self.exchange(whole)}
        return [
            figure_of(name, self._durations_s(run, budget_s / 2), moved / 1e9, "GB/s", at=format_bytes(size_bytes))
            for name, run in ways.items()
        ]

    def _durations_s(self, run: Callable[[], object], budget_s: float) -> list[float]:
        """Seconds of each of as many runs as ``budget_s`` holds: equally many on all ranks."""
        for _ in range(_WARM_UP):
            run()
        once_s = max(self._ranks.all_values(batch_s(run, self._device, 1), _WHAT))
        count = int(min(max(budget_s / max(once_s, 1e-6), _LEAST_SAMPLES), _MOST_SAMPLES))
        return [batch_s(run, self._device, 1) for _ in range(count)]


def slowest(of_ranks: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The least of every rate over the ranks, which have measured the same figures. In a step all wait for it."""
    if len(of_ranks) == 1:
        return list(of_ranks[0])
    return [
        replace(
            each[0],
            median=min(figure.median for figure in each),
            p20=min(figure.p20 for figure in each),
            p80=min(figure.p80 for figure in each),
            mean=min(figure.long_run for figure in each),
            slowest_over_fastest=min(figure.median for figure in each) / max(figure.median for figure in each),
        )
        for each in zip(*of_ranks, strict=True)
    ]


def most_contended(of_ranks: Sequence[Sequence[Contention]]) -> list[Contention]:
    """The least of every share over the ranks, which have measured the same groups."""
    return [
        replace(each[0], shares=tuple(map(min, zip(*(group.shares for group in each), strict=True))))
        for each in zip(*of_ranks, strict=True)
    ]
