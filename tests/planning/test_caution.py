"""Plans are made for a host that is a little slower than it was calibrated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protrain.planning import check, search
from protrain.planning.caution import HOST_SHARE, cautious
from protrain.profiler import ModelProfile
from tests.planning.machines import H100
from tests.planning.test_search import make_profile

GIB = 1024**3


def test_nothing_but_the_host_is_slower() -> None:
    machine = replace(H100, host_adam_weight_gparams=7.0)
    adam, weights = H100.host_adam_gparams * HOST_SHARE, 7.0 * HOST_SHARE
    assert cautious(machine) == replace(machine, host_adam_gparams=adam, host_adam_weight_gparams=weights)
    assert cautious(replace(H100, host_adam_weight_gparams=None)).host_adam_weight_gparams is None


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """Of blocks whose states are more than the device holds, and about as much work for the host as for the device."""
    return make_profile(32, elements=208 * 1024**2, saved=1300 * 1024**2, ms=12.0)


MACHINE = replace(H100, device_bytes=40 * GIB, host_bytes=200 * GIB)


def test_a_slower_host_costs_little(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    careful, late = search(profile, MACHINE), cautious(MACHINE)
    monkeypatch.setattr("protrain.planning.caution.HOST_SHARE", 1.0)
    bold = search(profile, MACHINE)
    assert careful.step_ms <= 1.02 * bold.step_ms
    assert check(careful, profile, late).step_ms == search(profile, late).step_ms
    assert check(careful, profile, late).step_ms <= 0.96 * check(bold, profile, late).step_ms


def test_what_is_predicted_is_for_the_machine_as_it_is(profile: ModelProfile) -> None:
    plan = search(profile, MACHINE)
    assert plan == check(plan, profile, MACHINE)
    assert plan.step_ms < check(plan, profile, cautious(MACHINE)).step_ms
