"""How much of its rate each lane keeps while others run: measured by calibration, or from shared ceilings."""

from __future__ import annotations

from itertools import compress, product

from protrain.hardware.profile import HardwareProfile
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, STREAM, UP

_ACTIVITIES = {GPU: "matmul", UP: "h2d", DOWN: "d2h", HOST: "host_adam", STREAM: "streamed_adam"}
OTHERS = [[other for other in range(len(LANES)) if other != lane] for lane in range(len(LANES))]
_LEAST = 0.25  # of a rate, which something always gets

# By lane, then by which of OTHERS[lane] run: what is left of the lane's rate, at most 1.
Rates = list[dict[tuple[bool, ...], float]]


def rates(hardware: HardwareProfile, host_adam_gbps: float, streamed_gbps: tuple[float, float] = (0.0, 0.0)) -> Rates:
    """For every lane and company.

    Args:
        hardware: the machine.
        host_adam_gbps: what the host optimizer alone moves in DRAM.
        streamed_gbps: what updates by the device of states in host memory alone move to the device, and back.
    """
    return [
        {
            present: max(_LEAST, min(1.0, _left(hardware, host_adam_gbps, streamed_gbps, lane, others, present)))
            for present in product((False, True), repeat=len(others))
        }
        for lane, others in enumerate(OTHERS)
    ]


def _left(
    hardware: HardwareProfile,
    host_adam_gbps: float,
    streamed_gbps: tuple[float, float],
    lane: int,
    others: list[int],
    present: tuple[bool, ...],
) -> float:
    known = _measured if hardware.contention else _shared
    beside = list(compress(others, present))
    if STREAM not in (lane, *beside):
        return known(hardware, host_adam_gbps, lane, beside)
    # Calibration measures it beside the host optimizer and products. The link it shares in the ratio of what is wanted.
    measured = any(_ACTIVITIES[STREAM] in group.activities for group in hardware.contention)
    without = [other for other in beside if other != STREAM]
    copying = [*(other for other in without if other not in (UP, DOWN)), *(way for way in (UP, DOWN) if way != lane)]
    if lane == STREAM:
        beside_host = 1.0
        if HOST in beside:
            beside_host = hardware.host_dram_gbps / (host_adam_gbps + sum(streamed_gbps))
        left = _measured(hardware, host_adam_gbps, lane, without) if measured else beside_host
        return min([left, *(_of_link(hardware, way, streamed_gbps) for way in without if way in (UP, DOWN))])
    if lane in (UP, DOWN):
        return min(known(hardware, host_adam_gbps, lane, copying), _of_link(hardware, lane, streamed_gbps))
    return known(hardware, host_adam_gbps, lane, beside if measured else copying)


def _of_link(hardware: HardwareProfile, way: int, streamed_gbps: tuple[float, float]) -> float:
    """What copies in one direction and streamed updates both keep when they share it, the other being busy as well."""
    alone = {UP: hardware.h2d_gbps, DOWN: hardware.d2h_gbps}
    wanted = alone[way] + streamed_gbps[0 if way == UP else 1]
    return alone[way] * min(1.0, hardware.bidirectional_gbps / sum(alone.values())) / wanted


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
