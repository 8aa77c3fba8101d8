"""The machine that a plan is made for: a little slower than the one that was calibrated.

[Note: caution] Of all plans the fastest is one whose host finishes just in time, so it is the one that loses most
where the host is slower than it was when it was calibrated: nearly all that it is late is added to the step. The
other side is flatter: a plan that leaves the host more time recomputes or moves a little more, and loses a third of
that. (7.24 B, batch 8 x 2048 on an H100: made for the rate as calibrated a plan is predicted to take 1,384 ms there
and 1,489 with nine tenths of it; made for 97% of it 1,398 and 1,470; made for nine tenths 1,422 and 1,425. Measured
on another, where 1,365 had been predicted: made for the rate as calibrated 1,465 ms, more slowly 1,411.) With
these odds the rate to make plans for is one that the host has two times out of three. That lies about halfway between
its rate over time and what it had four fifths of the time: 99% on steady hosts, 93% on one that neighbours slowed
down. What is predicted for the plan that is taken is for the machine as it was calibrated.
"""

from __future__ import annotations

from dataclasses import replace

from protrain.hardware.profile import HardwareProfile

UNKNOWN = 0.97  # where calibration did not tell how steady a host is: of most


def host_share(hardware: HardwareProfile) -> float:
    """The share of the host's rate that plans count on; all of it where the device is the same processor."""
    if hardware.device_type == "cpu":
        return 1.0
    slow = hardware.host_adam_p20_gparams
    return UNKNOWN if slow is None else (1.0 + min(1.0, slow / hardware.host_adam_gparams)) / 2


def cautious(hardware: HardwareProfile) -> HardwareProfile:
    """``hardware`` with a host that updates more slowly. See [Note: caution]."""
    share, weights, narrow = host_share(hardware), hardware.host_adam_weight_gparams, hardware.host_adam_narrow_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
        host_adam_narrow_gparams=None if narrow is None else narrow * share,
    )
