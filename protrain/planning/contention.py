"""How much of its rate each lane keeps while others run: measured by calibration, or from shared ceilings."""

from __future__ import annotations

from itertools import compress, product

from protrain.hardware.profile import HardwareProfile
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, UP

_ACTIVITIES = {GPU: "matmul", UP: "h2d", DOWN: "d2h", HOST: "host_adam"}
OTHERS = [[other for other in range(len(LANES)) if other != lane] for lane in range(len(LANES))]
_LEAST = 0.25  # of a rate, which something always gets

# By lane, then by which of OTHERS[lane] run: what is left of the lane's rate, at most 1.
Rates = list[dict[tuple[bool, ...], float]]


def rates(hardware: HardwareProfile, host_adam_gbps: float) -> Rates:
    """For every lane and company.

    Args:
        hardware: the machine.
        host_adam_gbps: what the host optimizer alone moves in DRAM.
    """
    left = _measured if hardware.contention else _shared
    return [
        {
            present: max(_LEAST, min(1.0, left(hardware, host_adam_gbps, lane, list(compress(others, present)))))
            for present in product((False, True), repeat=len(others))
        }
        for lane, others in enumerate(OTHERS)
    ]


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
