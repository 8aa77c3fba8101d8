"""How much longer operations take beside the operations of other lanes.

The share of its rate that a lane keeps beside another one is calibrated, or derived from shared ceilings.

Several ranks lose less to one another in a step than in calibration, where all of them do the same without a pause.
``_LOST_BY_RANKS`` is the part of the calibrated loss that made predictions fit 31 plans on two H100s and, measured
after it was chosen, 10 plans on two H200s. Of these and 52 plans of a descent on two H200s, 66% are predicted within 5%
and 95% within 10%. With all of the loss 87% would be within 10%.

What computing and collectives lose beside each other is ``lost_to_collectives``. Otherwise collectives are taken to
slow nothing down, and to be slowed down by nothing.

[Note: contention] Operations that run at the same time share the link, the root complex, the host's DRAM and the card's
power (not in the paper). Beside one other lane an operation keeps a share of its rate (``shares_kept``), and beside
several lanes the product of these shares. How long it runs beside which lanes is read from a run at full rates. Each
lane is busy for some part of the operation's time there, and lanes are taken to be busy independently of each other
within that time.

Shares of whole sets of lanes were tried in place of the product, as calibration measures some sets. Of 629 recorded
plans as many are predicted within 3%, 5% and 10%, with a point more or less.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, STREAM, UP

_ACTIVITIES = {GPU: "matmul", UP: "h2d", DOWN: "d2h", HOST: "host_adam", STREAM: "streamed_adam"}
_OTHER_WAY = {UP: DOWN, DOWN: UP}
_LEAST = 0.25  # no lane keeps less than this share of its rate beside another one
_LOST_BY_RANKS = 0.8

Shares = NDArray[np.float64]  # [lane, other lane]


def lost_to_collectives(hardware: HardwareProfile) -> float:
    """The milliseconds by which computing takes longer for each millisecond that a collective takes alone.

    A kernel of a collective occupies some of the GPU's processors. Beside computing it also lasts longer than alone,
    and computing loses a share of its rate for all of that time.
    """
    lost = max(0.0, 1.0 - hardware.share("matmul", "collective"))
    return lost / max(_LEAST, hardware.share("collective", "matmul"))


def shares_kept(hardware: HardwareProfile, host_adam_gbps: float, streamed_gbps: tuple[float, float]) -> Shares:
    """The share of its rate that every lane keeps beside every other lane, at most 1. Beside itself it keeps 1.

    Args:
        hardware: the machine.
        host_adam_gbps: the DRAM traffic of the host optimizer when nothing runs beside it.
        streamed_gbps: the link traffic of streamed updates, to the device and back, when nothing runs beside them.
    """
    alone_gbps = {UP: hardware.h2d_gbps, DOWN: hardware.d2h_gbps}
    both_ways = hardware.bidirectional_gbps / sum(alone_gbps.values())

    def known(lane: int, other: int) -> float:
        """The calibrated share. If there is none, copies share the link, and the host's DRAM with its optimizer."""
        if hardware.knows_contention:
            return hardware.share(_ACTIVITIES[lane], _ACTIVITIES[other])
        if lane == HOST and other in alone_gbps:
            return (hardware.host_dram_gbps - alone_gbps[other]) / host_adam_gbps
        if lane in alone_gbps and other == HOST:
            return max(0.5, hardware.host_dram_gbps / (alone_gbps[lane] + host_adam_gbps))
        return both_ways if _OTHER_WAY.get(lane) == other else 1.0

    def kept(lane: int, other: int) -> float:
        way = other if lane == STREAM else lane
        if STREAM not in (lane, other) or way not in alone_gbps:
            return known(lane, other)
        # Streamed updates fill the link in both directions, and share each with copies as both would transfer alone.
        ceiling = min(known(way, _OTHER_WAY[way]), both_ways)
        return ceiling * alone_gbps[way] / (alone_gbps[way] + streamed_gbps[0 if way == UP else 1])

    lost = _LOST_BY_RANKS if hardware.world_size > 1 and hardware.knows_contention else 1.0
    found = np.ones((len(LANES), len(LANES)))
    for lane, other in permutations(_ACTIVITIES, 2):
        found[lane, other] = 1.0 - lost * (1.0 - max(_LEAST, min(1.0, kept(lane, other))))
    return found


def slowdowns(shares: Shares, lanes: list[int], starts: list[float], ends: list[float]) -> list[float]:
    """The factor on the duration of each task. See [Note: contention].

    Args:
        shares: as ``shares_kept`` returns them.
        lanes: by task, in the order of issue.
        starts: when each task starts at full rates, in milliseconds.
        ends: when it ends at full rates.
    """
    lane_of, bounds = np.array(lanes), np.array((starts, ends))  # [task], and [start or end, task]
    lengths = bounds[1] - bounds[0]
    kept = np.ones(len(lanes))  # by task
    lost = 1.0 - shares[lane_of]  # [task, other lane]
    for other in _ACTIVITIES:
        of_other = np.flatnonzero(lane_of == other)
        if not of_other.size:
            continue
        # How long this lane has been busy when each task starts and ends.
        until = lengths[of_other].cumsum()
        busy = np.stack((until - lengths[of_other], until))
        start, end = np.interp(bounds, bounds[:, of_other].T.ravel(), busy.T.ravel())
        kept *= 1.0 - lost[:, other] * (end - start) / np.maximum(lengths, 1e-9)
    factors: list[float] = (1.0 / kept).tolist()
    return factors
