"""Host-rate scenarios: how fast the host may update in a step, and how likely each rate is.

[Note: host-rate scenarios] The fastest plan is one whose host finishes just in time. Where the host is slower than it
was when it was calibrated, such a plan loses nearly all that the host is late. A plan that leaves the host more time
recomputes or offloads a little more, and loses a third of that. (7.24 B, batch 8 x 2048 on an H100: a plan for the rate
as calibrated is predicted to take 1,384 ms at that rate and 1,489 at nine tenths of it; a plan for 97% takes 1,398 and
1,470; a plan for nine tenths 1,422 and 1,425. Measured on another machine, where 1,365 had been predicted: the plan for
the calibrated rate 1,465 ms, the plan for a slower host 1,411.) So the search minimises the mean over scenarios.

Ten machines with an H100 showed how slow hosts are in steps: six reached the predicted rate, one 90% of it, two 85% and
one 79%; one machine had 89% and 79% within ten minutes, under the same plan. The scenarios lose little over those ten
(bench/results/h100/NOTES.md).

What calibration says about a host moves all scenarios: its usual rate lies about halfway between its rate over time and
the rate that it kept four fifths of the time. That is 99% on steady hosts, and 93% on one that neighbours slowed down.
The time that a plan states is for the rate as calibrated.
"""

from __future__ import annotations

from dataclasses import replace

from protrain.hardware.profile import HardwareProfile

UNKNOWN = 0.97  # of the calibrated rate, where calibration did not say how steady the host is: the usual share
_SCENARIOS = ((1.0, 0.6), (0.89, 0.4))  # shares of a host's usual rate, falling, and how likely each is


def host_shares(hardware: HardwareProfile) -> tuple[tuple[float, float], ...]:
    """Shares of the host's calibrated rate that steps may have, falling, each with its probability.

    On a CPU the device is the same processor, and there is one scenario: all of the rate.
    """
    if hardware.device_type == "cpu":
        return ((1.0, 1.0),)
    slow = hardware.host_adam_p20_gparams
    usual = UNKNOWN if slow is None else (1.0 + min(1.0, slow / hardware.host_adam_gparams)) / 2
    return tuple((usual * share, probability) for share, probability in _SCENARIOS)


def scenarios(hardware: HardwareProfile) -> list[tuple[HardwareProfile, float]]:
    """``hardware`` with the host of every scenario, fastest first, and how likely each is."""
    return [(with_host(hardware, share), probability) for share, probability in host_shares(hardware)]


def slowest_share(hardware: HardwareProfile) -> float:
    """The share of the host's calibrated rate in the slowest scenario."""
    return host_shares(hardware)[-1][0]


def slowest(hardware: HardwareProfile) -> HardwareProfile:
    """``hardware`` with the host of the slowest scenario."""
    return with_host(hardware, slowest_share(hardware))


def with_host(hardware: HardwareProfile, share: float) -> HardwareProfile:
    """``hardware`` with a host that updates at ``share`` of its rate."""
    weights, narrow = hardware.host_adam_weight_gparams, hardware.host_adam_narrow_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
        host_adam_narrow_gparams=None if narrow is None else narrow * share,
    )
