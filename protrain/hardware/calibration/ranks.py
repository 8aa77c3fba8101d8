"""What several ranks have measured, as one: the slowest decides, because in a step all wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protrain.hardware.profile import Contention, Figure


def slowest(of_ranks: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The least of every rate over the ranks, which have measured the same figures."""
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
