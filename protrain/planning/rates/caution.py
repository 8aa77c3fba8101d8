"""The hosts that a plan is made for: as calibrated, and slower, as hosts often are in a step.

[Note: caution] Of all plans the fastest is one whose host finishes just in time, so it is the one that loses most
where the host is slower than it was when it was calibrated: nearly all that it is late is added to the step. The
other side is flatter: a plan that leaves the host more time recomputes or moves a little more, and loses a third of
that. (7.24 B, batch 8 x 2048 on an H100: made for the rate as calibrated a plan is predicted to take 1,384 ms there
and 1,489 with nine tenths of it; made for 97% of it 1,398 and 1,470; made for nine tenths 1,422 and 1,425. Measured
on another, where 1,365 had been predicted: made for the rate as calibrated 1,465 ms, more slowly 1,411.)

How slow hosts are in steps was seen on ten machines with an H100. As far as their records tell, which have the host's
rate of late and before that the time of a step, six reached what had been predicted of them, one 90% of it, two 85%,
one 79%; within ten minutes one had 89% and 79%, in the same plan. So of the fastest plans for the hosts in _HOSTS the
one that takes least in the mean over these is taken. The shares and probabilities, of a dozen that were tried, lose
little over hosts as those ten: bench/results/simulated/NOTES.md, "Which hosts plans are made for".

What calibration tells of a host moves both: its usual rate lies about halfway between its rate over time and
what it had four fifths of the time. That is 99% on steady hosts, 93% on one that neighbours slowed down. What is
predicted for the plan that is taken is for the machine as it was calibrated.
"""

from __future__ import annotations

from dataclasses import replace

from protrain.hardware.profile import HardwareProfile

UNKNOWN = 0.97  # where calibration did not tell how steady a host is: of most
_HOSTS = ((1.0, 0.6), (0.89, 0.4))  # shares of a host's usual rate, and how likely each is


def likely_shares(hardware: HardwareProfile) -> tuple[tuple[float, float], ...]:
    """Shares of the host's calibrated rate that steps may have, falling, each with its probability.

    All of it where the device is the same processor.
    """
    if hardware.device_type == "cpu":
        return ((1.0, 1.0),)
    slow = hardware.host_adam_p20_gparams
    usual = UNKNOWN if slow is None else (1.0 + min(1.0, slow / hardware.host_adam_gparams)) / 2
    return tuple((usual * share, probability) for share, probability in _HOSTS)


def likely_machines(hardware: HardwareProfile) -> list[tuple[HardwareProfile, float]]:
    """``hardware`` with each host that it may turn out to have, fastest first, and probabilities."""
    return [(_with_host(hardware, share), probability) for share, probability in likely_shares(hardware)]


def slow_share(hardware: HardwareProfile) -> float:
    """The least share of the host's rate that plans reckon with."""
    return likely_shares(hardware)[-1][0]


def cautious(hardware: HardwareProfile) -> HardwareProfile:
    """``hardware`` with the slowest host that plans reckon with."""
    return _with_host(hardware, slow_share(hardware))


def _with_host(hardware: HardwareProfile, share: float) -> HardwareProfile:
    weights, narrow = hardware.host_adam_weight_gparams, hardware.host_adam_narrow_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
        host_adam_narrow_gparams=None if narrow is None else narrow * share,
    )
