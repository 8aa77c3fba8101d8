"""The machine that a plan is made for: a little slower than the one that was calibrated.

[Note: caution] Of all plans the fastest is one whose host finishes just in time, so it is the one that loses most where
the host is slower than it was when it was calibrated: all that it is late is added to the step. The other side is flat:
a plan that leaves the host a tenth more time recomputes or moves a little more and loses a hundredth or two. (7.24 B,
batch 8 x 2048, 40 GiB: a plan made for 5.34 G parameters a second is predicted to take 1,510 ms there and 1,672 at 4.4;
one made for 4.87 takes 1,513 and 1,591.) So plans are compared on a machine whose host is halfway between its rate over
time and what it had four fifths of the time, as a step's dozens of updates meet good and bad moments: 99% on steady
hosts, 93% on one that neighbours slowed down. And less what steps have over calibration: more of the host's memory, in
which chunks lie well or badly. What is predicted for the plan that is taken is for the machine as it was calibrated.
"""

from __future__ import annotations

from dataclasses import replace

from protrain.hardware.profile import HardwareProfile

IN_STEPS = 0.97  # of what the host had when it was calibrated


def host_share(hardware: HardwareProfile) -> float:
    """The share of the host's rate that plans count on."""
    slow = hardware.host_adam_p20_gparams
    return IN_STEPS * (1.0 if slow is None else (1.0 + min(1.0, slow / hardware.host_adam_gparams)) / 2)


def cautious(hardware: HardwareProfile) -> HardwareProfile:
    """``hardware`` with a host that updates more slowly. See [Note: caution]."""
    share, weights = host_share(hardware), hardware.host_adam_weight_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
    )
