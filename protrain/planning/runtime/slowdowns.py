"""Slowdowns: the factors by which operations take longer beside the operations of other lanes.

[Note: contention] Operations that run at the same time share the link, the root complex, the host's DRAM and the card's
power (not in the paper). Beside other lanes an operation keeps a share of its rate
(``protrain.planning.rates.contention``). How long it runs beside which lanes is read from a run at full rates. Each
lane is busy for some part of the operation's time there, and lanes are taken to be busy independently of each other
within that time.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from protrain.planning.rates.contention import CONTENDING
from protrain.planning.timeline import STREAM

Times = NDArray[np.float64]
_BEFORE = -1.0  # milliseconds: a moment before the first operation


class Slowdowns:
    """The slowdowns of operations on one machine.

    Args:
        rates: of ``protrain.planning.rates.contention.rates``.
    """

    def __init__(self, rates: Times) -> None:
        # By the number of lanes that are looked at: shares of a lane's rate, as [set of other lanes that run, lane].
        # Of every lane before it, the lane of streamed updates is the last other one.
        self._kept = {STREAM: rates[..., 0, :STREAM].reshape(-1, STREAM), CONTENDING: rates.reshape(-1, CONTENDING)}

    def of(self, lane_starts: list[list[float]], lane_ends: list[list[float]]) -> list[list[float]]:
        """By lane, the factor on the duration of each of its operations. See [Note: contention].

        The lane of streamed updates, which most plans leave idle, costs no time here when it is idle.

        Args:
            lane_starts: by lane, when its operations start in a run at full rates, in milliseconds from 0 on.
            lane_ends: by lane, when they end in that run.
        """
        n_lanes = CONTENDING if lane_starts[STREAM] else STREAM
        # Every lane begins with an additional operation of no length, before all others.
        counts = [len(starts) + 1 for starts in lane_starts[:n_lanes]]
        lanes = [slice(first, last) for first, last in pairwise((0, *accumulate(counts)))]
        starts, ends = (
            np.fromiter(chain.from_iterable((_BEFORE, *times) for times in of_lanes[:n_lanes]), np.float64, sum(counts))
            for of_lanes in (lane_starts, lane_ends)
        )
        lengths = ends - starts
        # Per operation, the part of its time in which each other lane is busy, from 0 to 1. Rows are in lane order.
        beside = np.empty((n_lanes - 1, len(starts)))
        for at, lane in enumerate(lanes):
            busy_starts, busy_ends = starts[lane], ends[lane]
            before, after = slice(lane.start), slice(lane.stop, None)
            moments = np.concatenate((starts[before], starts[after], ends[before], ends[after]))
            last = busy_starts.searchsorted(moments, "right") - 1  # the last operation that has begun
            busy = np.minimum(moments, busy_ends.take(last))
            busy -= busy_starts.take(last)
            done = np.zeros(len(busy_starts))  # by operation: how long the lane has been busy when it starts
            lengths[lane][:-1].cumsum(out=done[1:])
            busy += done.take(last)
            half = len(busy) // 2
            part = busy[half:] - busy[:half]
            # Rows leave out the operation's own lane, so this lane's row is one less for operations of earlier lanes.
            if at:
                beside[at - 1, before] = part[: lane.start]
            if at < n_lanes - 1:
                beside[at, after] = part[lane.start :]
        beside /= np.maximum(lengths, 1e-9)
        beside = np.minimum(np.maximum(beside, 0.0), 1.0)
        # Per operation and set of other lanes, the part of its time in which exactly these lanes are busy.
        weights = np.ones((1, len(starts)))
        for share, alone in zip(beside, 1.0 - beside, strict=True):
            more = np.empty((2 * len(weights), len(starts)))
            np.multiply(weights, alone, out=more[0::2])
            np.multiply(weights, share, out=more[1::2])
            weights = more
        weights *= np.repeat(self._kept[n_lanes], counts, axis=1)
        factors: list[float] = (1.0 / weights.sum(axis=0)).tolist()
        idle: list[list[float]] = [[]] * (CONTENDING - n_lanes)
        collectives = [[1.0] * len(of_lane) for of_lane in lane_starts[CONTENDING:]]
        return [*(factors[lane.start + 1 : lane.stop] for lane in lanes), *idle, *collectives]
