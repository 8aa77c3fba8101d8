"""How much longer operations take beside those of other lanes.

[Note: contention] What runs at the same time shares the link, the root complex, the host's DRAM and the card's power
(not in the paper). Every operation is stretched by what is left of its rate beside the others
(:mod:`protrain.planning.rates.contention`), for the part of its time in which they would run at their full rates, as if
lanes were busy independently of each other within that time.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise, product

import numpy as np
from numpy.typing import NDArray

from protrain.planning.rates.contention import Rates
from protrain.planning.timeline import LANES, STREAM

Times = NDArray[np.float64]
_BEFORE = -1.0  # milliseconds: before the first operation


class Stretches:
    """For one machine.

    Args:
        rates: by lane, what is left of its rate beside others.
    """

    def __init__(self, rates: Rates) -> None:
        # [company, lane], by the number of lanes that are looked at. A company says of the others which work.
        self._left = {n_lanes: _left(rates, n_lanes) for n_lanes in (STREAM, len(LANES))}

    def of(self, lane_starts: list[list[float]], lane_ends: list[list[float]]) -> list[list[float]]:
        """By lane, per operation the factor on its duration. See [Note: contention].

        The last lane, which most plans leave idle, costs nothing then.

        Args:
            lane_starts: by lane, when its operations start at full rate, in milliseconds, from 0 on.
            lane_ends: and when they end.
        """
        n_lanes = len(LANES) if lane_starts[STREAM] else STREAM
        # Every lane begins with an operation of no length before all others.
        counts = [len(starts) + 1 for starts in lane_starts[:n_lanes]]
        lanes = [slice(first, last) for first, last in pairwise((0, *accumulate(counts)))]
        starts, ends = (
            np.fromiter(chain.from_iterable((_BEFORE, *times) for times in of_lanes[:n_lanes]), np.float64, sum(counts))
            for of_lanes in (lane_starts, lane_ends)
        )
        lengths = ends - starts
        # Per operation, of its time the part that each other lane works, between 0 and 1; others in the order of lanes.
        beside = np.empty((n_lanes - 1, len(starts)))
        for at, lane in enumerate(lanes):
            busy_starts, busy_ends, (before, after) = (
                starts[lane],
                ends[lane],
                (slice(lane.start), slice(lane.stop, None)),
            )
            moments = np.concatenate((starts[before], starts[after], ends[before], ends[after]))
            last = busy_starts.searchsorted(moments, "right") - 1  # that has begun
            busy = np.minimum(moments, busy_ends.take(last))
            busy -= busy_starts.take(last)
            done = np.zeros(len(busy_starts))  # when an operation starts, by those before it
            lengths[lane][:-1].cumsum(out=done[1:])
            busy += done.take(last)
            half = len(busy) // 2
            part = busy[half:] - busy[:half]
            # A lane is one row higher for those behind it than for those before it.
            if at:
                beside[at - 1, before] = part[: lane.start]
            if at < n_lanes - 1:
                beside[at, after] = part[lane.start :]
        beside /= np.maximum(lengths, 1e-9)
        beside = np.minimum(np.maximum(beside, 0.0), 1.0)
        # For every company how much of its time an operation has that.
        weights = np.ones((1, len(starts)))
        for share, alone in zip(beside, 1.0 - beside, strict=True):
            more = np.empty((2 * len(weights), len(starts)))
            np.multiply(weights, alone, out=more[0::2])
            np.multiply(weights, share, out=more[1::2])
            weights = more
        weights *= np.repeat(self._left[n_lanes], counts, axis=1)
        factors: list[float] = (1.0 / weights.sum(axis=0)).tolist()
        return [*(factors[lane.start + 1 : lane.stop] for lane in lanes), *([[]] * (len(LANES) - n_lanes))]


def _left(rates: Rates, n_lanes: int) -> Times:
    """By company, of the other of the first ``n_lanes`` lanes, and by lane what is left of its rate."""
    idle = (False,) * (len(LANES) - n_lanes)
    companies = product((False, True), repeat=n_lanes - 1)
    return np.array([[of_lane[*present, *idle] for of_lane in rates[:n_lanes]] for present in companies])
