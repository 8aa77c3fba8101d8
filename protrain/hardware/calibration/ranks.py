"""What several ranks measure: the collectives of a step, and everything else as one, of which the slowest decides.

Collectives go by the calls and through the communicators that training uses. Ranks gather the weights of a chunk, and
exchange its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from protrain.distributed.ranks import Ranks
from protrain.hardware.calibration.activities import random_tensor
from protrain.hardware.calibration.timing import batch_s
from protrain.hardware.profile import Contention

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
        return math.ceil(_MARGIN * seconds / self._once_s(self.both))

    def gbps(self, size_bytes: int, *, budget_s: float) -> dict[str, Any]:
        """The rates of a gather and of an exchange, by the names of a profile's fields.

        They count the bytes that a rank receives from others, or sends to them.
        """
        whole = self._divisible(size_bytes)
        moved = whole - whole // self._ranks.size
        ways = {"all_gather_gbps": lambda: self.gather(whole), "all_to_all_gbps": lambda: self.exchange(whole)}
        rates = {}
        for name, run in ways.items():
            count = int(min(max(budget_s / 2 / self._once_s(run), _LEAST_SAMPLES), _MOST_SAMPLES))
            rates[name] = moved / 1e9 / median(batch_s(run, self._device, 1) for _ in range(count))
        return rates

    def _once_s(self, run: Callable[[], object]) -> float:
        """Seconds that ``run`` takes on the slowest rank, so that all of them do it equally often."""
        run()
        own_s = batch_s(run, self._device, _WARM_UP)
        return max(1e-6, *self._ranks.all_values(own_s, _WHAT))


def slowest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The least of every rate over the ranks, which have measured the same rates. In a step all wait for it."""
    return {name: min(rates[name] for rates in of_ranks) for name in of_ranks[0]}


def most_contended(of_ranks: Sequence[Sequence[Contention]]) -> list[Contention]:
    """The least of every share over the ranks, which have measured the same groups."""
    return [
        replace(each[0], shares=tuple(map(min, zip(*(group.shares for group in each), strict=True))))
        for each in zip(*of_ranks, strict=True)
    ]
