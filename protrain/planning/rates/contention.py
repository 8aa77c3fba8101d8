"""The share of its rate that each lane keeps while others run, as calibrated or derived from shared ceilings.

Several ranks lose less to one another in a step than in calibration, where all of them do the same without a pause.
``_LOST_BY_RANKS`` is the part of the calibrated loss that made predictions fit 31 plans on two H100s. Of these, 81%
are predicted within 5%, and 61% would be with all of the loss. Of 10 plans on two H200s, measured after it was chosen,
80% are within 5%, and 40% would be.

What computing and collectives lose beside each other is ``lost_to_collectives``. Otherwise collectives are taken to
slow nothing down, and to be slowed down by nothing.
"""

from __future__ import annotations

from itertools import compress

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
