"""The machine that the planner's tests start from: one H100, kept as it was calibrated.

The profile that ships may be replaced by another machine's, with which the same seeds would be other cases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import predict

H100 = HardwareProfile.load(Path(__file__).with_name("h100.json"))


def judge_as_calibrated(patch: pytest.MonkeyPatch) -> None:
    """Let searches make plans for the host as it was calibrated, not for a slower one."""
    patch.setattr(predict, "slower_share", lambda hardware: 1.0)


def with_host(hardware: HardwareProfile, share: float) -> HardwareProfile:
    """``hardware`` with a host that updates at ``share`` of its rate."""
    weights, narrow = hardware.host_adam_weight_gparams, hardware.host_adam_narrow_gparams
    return replace(
        hardware,
        host_adam_gparams=hardware.host_adam_gparams * share,
        host_adam_weight_gparams=None if weights is None else weights * share,
        host_adam_narrow_gparams=None if narrow is None else narrow * share,
    )
