"""The share of its rate that each lane keeps while others run, as calibrated or derived from shared ceilings.

What computing loses beside collectives is in its durations (:mod:`protrain.planning.runtime.durations`). Otherwise
collectives are taken to slow nothing down, and to be slowed down by nothing.
"""

from __future__ import annotations

from itertools import compress, product

from protrain.hardware.profile import HardwareProfile
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, UP

_ACTIVITIES = {GPU: "matmul", UP: "h2d", DOWN: "d2h", HOST: "host_adam", STREAM: "streamed_adam"}
CONTENDING = len(_ACTIVITIES)  # the first so many lanes slow each other down
OTHERS = [[other for other in range(CONTENDING) if other != lane] for lane in range(CONTENDING)]
_OTHER_WAY = {UP: DOWN, DOWN: UP}
_LEAST = 0.25  # no lane keeps less than this share of its rate

# By lane, then by which of OTHERS[lane] run: the share of its rate that the lane keeps, at most 1.
Rates = list[dict[tuple[bool, ...], float]]


def rates(hardware: HardwareProfile, host_adam_gbps: float, streamed_gbps: tuple[float, float] = (0.0, 0.0)) -> Rates:
    """The share that every lane keeps beside every set of other lanes.

    Args:
        hardware: the machine.
        host_adam_gbps: the DRAM traffic of the host optimizer when nothing runs beside it.
        streamed_gbps: the link traffic of streamed updates, to the device and back, when nothing runs beside them.
    """
    return [
        {
            present: max(_LEAST, min(1.0, _kept(hardware, host_adam_gbps, streamed_gbps, lane, others, present)))
            for present in product((False, True), repeat=len(others))
        }
        for lane, others in enumerate(OTHERS)
    ]


def _kept(
    hardware: HardwareProfile,
    host_adam_gbps: float,
    streamed_gbps: tuple[float, float],
    lane: int,
    others: list[int],
    present: tuple[bool, ...],
) -> float:
    """The share that ``lane`` keeps beside those of ``others`` that are ``present``, without limits."""
    known = _measured if hardware.knows_contention else _shared
    beside = list(compress(others, present))
    if STREAM not in (lane, *beside):
        return known(hardware, host_adam_gbps, lane, beside)
    # Calibration measures streamed updates beside the host optimizer and beside matrix products. Beside copies, the
    # link is full in both directions, and each gets a share of it in proportion to what it would transfer alone.
    measured = any(_ACTIVITIES[STREAM] in group.activities for group in hardware.contention)
    without = [other for other in beside if other != STREAM]
    copies = [other for other in without if other in _OTHER_WAY]
    no_copies = [other for other in without if other not in copies]
    busy = [*no_copies, *(way for way in _OTHER_WAY if way != lane)]
    if lane == STREAM:
        beside_host = 1.0
        if HOST in beside:
            beside_host = hardware.host_dram_gbps / (host_adam_gbps + sum(streamed_gbps))
        kept = _measured(hardware, host_adam_gbps, lane, without) if measured else beside_host
        shares = [
            _of_link(hardware, host_adam_gbps, way, [*no_copies, _OTHER_WAY[way]], streamed_gbps) for way in copies
        ]
        return min([kept, *shares])
    if lane in _OTHER_WAY:
        return _of_link(hardware, host_adam_gbps, lane, busy, streamed_gbps)
    with_copies = known(hardware, host_adam_gbps, lane, busy)
    if not measured:
        return with_copies
    kept = known(hardware, host_adam_gbps, lane, beside)
    return min(kept, with_copies) if copies else kept


def _of_link(
    hardware: HardwareProfile,
    host_adam_gbps: float,
    way: int,
    beside: list[int],
    streamed_gbps: tuple[float, float],
) -> float:
    """The share that copies in one direction and streamed updates both keep when they share that direction.

    ``beside`` are the other lanes that run, the copies in the other direction among them.
    """
    known = _measured if hardware.knows_contention else _shared
    alone = {UP: hardware.h2d_gbps, DOWN: hardware.d2h_gbps}
    ceiling = min(known(hardware, host_adam_gbps, way, beside), hardware.bidirectional_gbps / sum(alone.values()))
    return ceiling * alone[way] / (alone[way] + streamed_gbps[0 if way == UP else 1])


def _measured(hardware: HardwareProfile, _: float, lane: int, beside: list[int]) -> float:
    return hardware.share(_ACTIVITIES[lane], [_ACTIVITIES[other] for other in beside])


def _shared(hardware: HardwareProfile, host_adam_gbps: float, lane: int, beside: list[int]) -> float:
    """Copies in both directions share the link; copies and the host optimizer share the host's DRAM."""
    copies = {UP: hardware.h2d_gbps, DOWN: hardware.d2h_gbps}
    both_ways = min(1.0, hardware.bidirectional_gbps / sum(copies.values()))
    if lane == GPU:
        return 1.0
    if lane == HOST:
        taken = sum(copies[other] for other in beside if other in copies)
        return (hardware.host_dram_gbps - taken) / host_adam_gbps
    slower = both_ways if UP in beside or DOWN in beside else 1.0
    wanted = copies[lane] * slower + (host_adam_gbps if HOST in beside else 0.0)
    return slower * max(0.5, min(1.0, hardware.host_dram_gbps / wanted))
