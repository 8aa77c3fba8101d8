"""How much longer operations take beside those of other lanes.

[Note: contention] What runs at the same time shares the link, the root complex, the host's DRAM and the card's power
(not in the paper). Every operation is stretched by what is left of its rate beside the others
(:mod:`protrain.planning.contention`), for the part of its time in which they would run at their full rates, as if lanes
were busy independently of each other within that time.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise, product

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
    starts, ends = (np.fromiter(chain.from_iterable(lanes), np.float64) for lanes in (lane_starts, lane_ends))
    moments = np.concatenate((starts, ends))
    firsts = [0, *accumulate(counts)]
    lanes = [slice(first, last) for first, last in pairwise(firsts)]
    lengths = np.maximum(ends - starts, 1e-9)
    # By lane, per operation of any lane: the part of its time that the lane works, between 0 and 1.
    shares = np.empty((n_lanes, len(starts)))
    for lane, share in zip(lanes, shares, strict=True):
        busy = _busy(starts[lane], ends[lane], moments)
        np.divide(busy[len(starts) :] - busy[: len(starts)], lengths, out=share)
    shares = np.minimum(np.maximum(shares, 0.0), 1.0)
    # Per operation, as OTHERS of its lane has them; then for every company how much of its time it has that.
    beside = np.concatenate(
        [shares[others[: n_lanes - 1], lane] for others, lane in zip(OTHERS, lanes, strict=False)], 1
    )
    weights = np.ones((1, len(starts)))
    for share in beside:
        weights = (weights[:, None] * np.stack((1.0 - share, share))).reshape(-1, len(starts))
    idle = (False,) * (len(LANES) - n_lanes)
    companies = product((False, True), repeat=n_lanes - 1)
    left = np.array([[of_lane[*present, *idle] for of_lane in rates[:n_lanes]] for present in companies])
    rate = (weights * np.repeat(left, counts, axis=1)).sum(axis=0)
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
