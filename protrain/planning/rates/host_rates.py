"""The slower host that plans are made for.

[Note: the slower host] The fastest plan is one whose host finishes just in time. If the host is slower than it was when
it was calibrated, a step under such a plan is longer by nearly all the time that the host is late. A plan that leaves
the host more time recomputes or offloads a little more, and loses a third of that. An example is a 7.24 B model with
batch 8 x 2048 on an H100. Measured where 1,365 ms had been predicted, the plan for the calibrated rate took 1,465 ms,
and a plan for a slower host 1,411 ms. So the search judges plans on a host that is slower than usual. The time that a
plan states is for the rate as calibrated.

Ten machines with an H100 showed how slow hosts are in steps: six reached the predicted rate, one 90% of it, two 85% and
one 79%. Predicted over that distribution, plans for one slower host are as fast as plans for the mean over two rates,
and their search took a fifth less time. Plans for 80% of the rate are predicted to lose up to 3% on a host as
calibrated, plans for 95% up to 8% on one at 85%. The seven cases are in bench/results/h100/NOTES.md.

A host's usual rate lies about halfway between its mean rate in calibration and the rate that it kept four fifths of the
time. That is 99% of the calibrated rate on steady hosts, and was 93% on a host that other tenants slowed down.
"""

from __future__ import annotations

from dataclasses import replace

from protrain.hardware.profile import HardwareProfile

UNKNOWN = 0.97  # usual share of the calibrated rate if calibration did not measure how steady the host is
_SLOWER = 0.89  # share of a host's usual rate that plans are made for


def slower_share(hardware: HardwareProfile) -> float:
    """The share of the host's calibrated rate that plans are made for. 1 on a CPU, where the device is the host."""
    if hardware.device_type == "cpu":
        return 1.0
    slow = hardware.host_adam_p20_gparams
    usual = UNKNOWN if slow is None else (1.0 + min(1.0, slow / hardware.host_adam_gparams)) / 2
    return usual * _SLOWER


def with_host(hardware: HardwareProfile, share: float) -> HardwareProfile:
    """``hardware`` with a host that updates at ``share`` of its rate."""
    weights, narrow = hardware.host_adam_weight_gparams, hardware.host_adam_narrow_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
        host_adam_narrow_gparams=None if narrow is None else narrow * share,
    )
