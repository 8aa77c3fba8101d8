"""Host-rate scenarios: how fast the host may update in a step, and how likely each rate is.

[Note: host-rate scenarios] The fastest plan is one whose host finishes just in time. If the host is slower than it was
when it was calibrated, a step under such a plan is longer by nearly all the time that the host is late. A plan that
leaves the host more time recomputes or offloads a little more, and loses a third of that. An example is a 7.24 B model
with batch 8 x 2048 on an H100. A plan for the calibrated rate is predicted to take 1,384 ms at that rate and 1,489 ms
at nine tenths of it; a plan for 97% of the rate 1,398 and 1,470 ms; a plan for nine tenths 1,422 and 1,425 ms. Measured
on another machine, where 1,365 ms had been predicted, the plan for the calibrated rate took 1,465 ms, and the plan for
a slower host 1,411 ms. So the search minimises the mean over scenarios.

Ten machines with an H100 showed how slow hosts are in steps: six reached the predicted rate, one 90% of it, two 85% and
one 79%. One machine had 89% and 79% within ten minutes, under the same plan. Plans chosen by the scenarios lose little
over those ten machines (bench/results/h100/NOTES.md).

Calibration shifts all scenarios: a host's usual rate lies about halfway between its mean rate and the rate that it kept
four fifths of the time. That is 99% of the calibrated rate on steady hosts, and was 93% on a host that other tenants
slowed down. The time that a plan states is for the rate as calibrated.
"""

from __future__ import annotations

from dataclasses import replace

from protrain.hardware.profile import HardwareProfile

UNKNOWN = 0.97  # usual share of the calibrated rate if calibration did not measure how steady the host is
_SCENARIOS = ((1.0, 0.6), (0.89, 0.4))  # shares of a host's usual rate, from the largest down, with their probabilities


def host_shares(hardware: HardwareProfile) -> tuple[tuple[float, float], ...]:
    """Shares of the host's calibrated rate that steps may have, from the largest down, each with its probability.

    On a CPU the device is the same processor, and the only scenario is the whole rate.
    """
    if hardware.device_type == "cpu":
        return ((1.0, 1.0),)
    slow = hardware.host_adam_p20_gparams
    usual = UNKNOWN if slow is None else (1.0 + min(1.0, slow / hardware.host_adam_gparams)) / 2
    return tuple((usual * share, probability) for share, probability in _SCENARIOS)


def scenarios(hardware: HardwareProfile) -> list[tuple[HardwareProfile, float]]:
    """``hardware`` with the host of every scenario, fastest first, and the scenario's probability."""
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
