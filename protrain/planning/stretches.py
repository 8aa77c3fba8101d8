"""How much longer operations take beside those of other lanes.

[Note: contention] What runs at the same time shares the link, the root complex, the host's DRAM and the card's power
(not in the paper). Every operation is stretched by what is left of its rate beside the others
(:mod:`protrain.planning.contention`), for the part of its time in which they would run at their full rates, as if lanes
were busy independently of each other within that time.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate, pairwise, product

import numpy as np
from numpy.typing import NDArray

from protrain.planning.contention import OTHERS, Rates
from protrain.planning.timeline import LANES, STREAM

Times = NDArray[np.float64]


def stretches(lane_starts: list[list[float]], lane_ends: list[list[float]], rates: Rates) -> list[list[float]]:
    """By lane, per operation the factor on its duration. See [Note: contention].

    The last lane, which most plans leave idle, costs nothing then.

    Args:
        lane_starts: by lane, when its operations start at full rate, in milliseconds.
        lane_ends: and when they end.
        rates: by lane, what is left of its rate beside others.
    """
    n_lanes = len(LANES) if lane_starts[STREAM] else STREAM
    counts = [len(starts) for starts in lane_starts[:n_lanes]]
    starts = np.array([moment for lane in lane_starts for moment in lane])
    ends = np.array([moment for lane in lane_ends for moment in lane])
    firsts = [0, *accumulate(counts)]
    lanes = [slice(first, last) for first, last in pairwise(firsts)]
    lengths = np.maximum(ends - starts, 1e-9)
    # By lane, per operation of any lane: the part of its time that the lane works, between 0 and 1.
    shares = []
    for lane in lanes:
        busy = _busy(starts[lane], ends[lane], ends) - _busy(starts[lane], ends[lane], starts)
        shares.append(np.clip(busy / lengths, 0.0, 1.0))
    beside = [
        np.concatenate([shares[others[which]][lane] for others, lane in zip(OTHERS[:n_lanes], lanes, strict=True)])
        for which in range(n_lanes - 1)
    ]
    alone = [1.0 - share for share in beside]
    rate = np.zeros(len(starts))
    idle = (False,) * (len(LANES) - n_lanes)
    for present in product((False, True), repeat=n_lanes - 1):
        weights = reduce(np.multiply, (beside[at] if runs else alone[at] for at, runs in enumerate(present)))
        rate += weights * np.repeat([of_lane[*present, *idle] for of_lane in rates[:n_lanes]], counts)
    factors: list[float] = (1.0 / rate).tolist()
    return [*(factors[lane] for lane in lanes), *([[]] * (len(LANES) - n_lanes))]


def _busy(starts: Times, ends: Times, until: Times) -> Times:
    """How much of the time up to each moment of ``until`` operations take that follow each other."""
    if not starts.size:
        return np.zeros_like(until)
    lengths = ends - starts
    before = np.concatenate(([0.0], np.cumsum(lengths)))  # busy time before each operation
    at = np.searchsorted(starts, until, side="right") - 1
    inside = np.minimum(until, ends[at]) - starts[at]
    return np.where(at < 0, 0.0, before[at] + inside)
