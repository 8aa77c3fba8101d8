"""The machine that a plan is made for: a little slower than the one that was calibrated.

[Note: caution] Of all plans the fastest is one whose host finishes just in time, so it is the one that loses most where
the host is slower than it was when it was calibrated: all that it is late is added to the step. And a host is a tenth
slower easily, for other programs, or for where in its memory chunks lie. The other side is flat: a plan that leaves the
host a tenth more time recomputes or moves a little more and loses a hundredth. (7.24 B, batch 8 x 2048, 40 GiB: a plan
made for 5.34 G parameters a second is predicted to take 1,510 ms there and 1,672 at 4.4; one made for 4.87 takes 1,513
and 1,591.) So plans are compared as they would be on the slower machine. What is predicted for the one that is taken is
for the machine as it was calibrated.
"""

from __future__ import annotations

from dataclasses import replace

from protrain.hardware.profile import HardwareProfile

HOST_SHARE = 0.9  # of the rate of the host's AdamW that plans may count on


def cautious(hardware: HardwareProfile) -> HardwareProfile:
    """``hardware`` with a host that updates more slowly. See [Note: caution]."""
    weights = hardware.host_adam_weight_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * HOST_SHARE,
        host_adam_weight_gparams=None if weights is None else weights * HOST_SHARE,
    )
