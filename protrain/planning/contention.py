"""How much longer operations take beside the operations of other lanes.

The share of its rate that a lane keeps while others run is calibrated, or derived from shared ceilings.

Several ranks lose less to one another in a step than in calibration, where all of them do the same without a pause.
``_LOST_BY_RANKS`` is the part of the calibrated loss that made predictions fit 31 plans on two H100s. Of these, 81% are
predicted within 5%, and 61% would be with all of the loss. Of 10 plans on two H200s, measured after it was chosen, 80%
are within 5%, and 40% would be.

What computing and collectives lose beside each other is ``lost_to_collectives``. Otherwise collectives are taken to
slow nothing down, and to be slowed down by nothing.

[Note: contention] Operations that run at the same time share the link, the root complex, the host's DRAM and the card's
power (not in the paper). Beside other lanes an operation keeps a share of its rate (``rates``). How long it runs beside
which lanes is read from a run at full rates. Each lane is busy for some part of the operation's time there, and lanes
are taken to be busy independently of each other within that time.
"""

from __future__ import annotations

from itertools import accumulate, chain, compress, pairwise

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, UP

_ACTIVITIES = {GPU: "matmul", UP: "h2d", DOWN: "d2h", HOST: "host_adam", STREAM: "streamed_adam"}
CONTENDING = len(_ACTIVITIES)  # the first so many lanes slow each other down
OTHERS = [[other for other in range(CONTENDING) if other != lane] for lane in range(CONTENDING)]
_OTHER_WAY = {UP: DOWN, DOWN: UP}
_LEAST = 0.25  # no lane keeps less than this share of its rate
_LOST_BY_RANKS = 0.8


def lost_to_collectives(hardware: HardwareProfile) -> float:
    """The milliseconds by which computing takes longer for each millisecond that a collective takes alone.

    A kernel of a collective occupies some of the GPU's processors. Beside computing it also lasts longer than alone,
    and computing loses a share of its rate for all of that time.
    """
    lost = max(0.0, 1.0 - hardware.share("matmul", ["collective"]))
    return lost / max(_LEAST, hardware.share("collective", ["matmul"]))


def rates(
    hardware: HardwareProfile, host_adam_gbps: float, streamed_gbps: tuple[float, float] = (0.0, 0.0)
) -> NDArray[np.float64]:
    """The share of its rate that every lane keeps beside every set of other lanes, at most 1.

    An index says of each of OTHERS[lane] whether it runs, 0 or 1, and the last index is the lane.

    Args:
        hardware: the machine.
        host_adam_gbps: the DRAM traffic of the host optimizer when nothing runs beside it.
        streamed_gbps: the link traffic of streamed updates, to the device and back, when nothing runs beside them.
    """
    alone_gbps = {UP: hardware.h2d_gbps, DOWN: hardware.d2h_gbps}
    both_ways = hardware.bidirectional_gbps / sum(alone_gbps.values())
    # Calibration measures streamed updates beside the host optimizer and beside matrix products.
    knows_streamed = any(_ACTIVITIES[STREAM] in group.activities for group in hardware.contention)

    def measured(lane: int, beside: list[int]) -> float:
        return hardware.share(_ACTIVITIES[lane], [_ACTIVITIES[other] for other in beside])

    def derived(lane: int, beside: list[int]) -> float:
        """Copies in both directions share the link; copies and the host optimizer share the host's DRAM."""
        if lane == GPU:
            return 1.0
        if lane == HOST:
            taken = sum(alone_gbps[other] for other in beside if other in alone_gbps)
            return (hardware.host_dram_gbps - taken) / host_adam_gbps
        slower = min(1.0, both_ways) if UP in beside or DOWN in beside else 1.0
        wanted = alone_gbps[lane] * slower + (host_adam_gbps if HOST in beside else 0.0)
        return slower * max(0.5, min(1.0, hardware.host_dram_gbps / wanted))

    known = measured if hardware.knows_contention else derived

    def of_link(way: int, beside: list[int]) -> float:
        """The share that copies in one direction and streamed updates both keep when they share that direction.

        ``beside`` are the other lanes that run, the copies in the other direction among them. Beside streamed updates
        the link is full in both directions, and each gets a share in proportion to what it would transfer alone.
        """
        ceiling = min(known(way, beside), both_ways)
        return ceiling * alone_gbps[way] / (alone_gbps[way] + streamed_gbps[0 if way == UP else 1])

    def kept(lane: int, beside: list[int]) -> float:
        """The share that ``lane`` keeps beside those lanes, without limits."""
        if STREAM not in (lane, *beside):
            return known(lane, beside)
        without = [other for other in beside if other != STREAM]
        copies = [other for other in without if other in alone_gbps]
        no_copies = [other for other in without if other not in copies]
        if lane == STREAM:
            share = hardware.host_dram_gbps / (host_adam_gbps + sum(streamed_gbps)) if HOST in beside else 1.0
            if knows_streamed:
                share = measured(lane, without)
            return min([share, *(of_link(way, [*no_copies, _OTHER_WAY[way]]) for way in copies)])
        busy = [*no_copies, *(way for way in alone_gbps if way != lane)]
        if lane in alone_gbps:
            return of_link(lane, busy)
        with_copies = known(lane, busy)
        if not knows_streamed:
            return with_copies
        return min(known(lane, beside), with_copies) if copies else known(lane, beside)

    lost = _LOST_BY_RANKS if hardware.world_size > 1 and hardware.knows_contention else 1.0
    found = np.empty((2,) * (CONTENDING - 1) + (CONTENDING,))
    for *present, lane in np.ndindex(found.shape):
        share = max(_LEAST, min(1.0, kept(lane, list(compress(OTHERS[lane], present)))))
        found[*present, lane] = 1.0 - lost * (1.0 - share)
    return found


Times = NDArray[np.float64]
_BEFORE = -1.0  # milliseconds: a moment before the first operation


def slowdowns(rates: Times, lane_starts: list[list[float]], lane_ends: list[list[float]]) -> list[list[float]]:
    """By lane, the factor on the duration of each of its operations. See [Note: contention].

    The lane of streamed updates, which most plans leave idle, costs no time here when it is idle.

    Args:
        rates: the shares that the function of this name returns.
        lane_starts: by lane, when its operations start in a run at full rates, in milliseconds from 0 on.
        lane_ends: by lane, when they end in that run.
    """
    n_lanes = CONTENDING if lane_starts[STREAM] else STREAM
    # Shares of a lane's rate, as [set of other lanes that run, lane]. Of every other lane, STREAM is the last.
    kept = (rates if lane_starts[STREAM] else rates[..., 0, :STREAM]).reshape(-1, n_lanes)
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
    weights *= np.repeat(kept, counts, axis=1)
    factors: list[float] = (1.0 / weights.sum(axis=0)).tolist()
    idle: list[list[float]] = [[]] * (CONTENDING - n_lanes)
    collectives = [[1.0] * len(of_lane) for of_lane in lane_starts[CONTENDING:]]
    return [*(factors[lane.start + 1 : lane.stop] for lane in lanes), *idle, *collectives]
