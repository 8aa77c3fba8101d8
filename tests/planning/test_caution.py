"""Plans are made for a host that is a little slower than it was calibrated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.planning import check, explain, search
from protrain.planning.rates.caution import UNKNOWN, cautious, host_share
from protrain.profiler import ModelProfile
from tests.planning.machines import H100
from tests.planning.test_search import make_profile

GIB = 1024**3
MACHINE = replace(  # its host had 4.2 or less a fifth of the time
    H100, device_bytes=40 * GIB, host_bytes=200 * GIB, host_adam_gparams=4.9, host_adam_p20_gparams=4.2
)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """Of blocks whose states are more than the device holds, and about as much work for the host as for the device."""
    return make_profile(32, elements=208 * 1024**2, saved=1300 * 1024**2, ms=12.0)


def test_nothing_but_the_host_is_slower() -> None:
    machine = replace(MACHINE, host_adam_weight_gparams=7.0, host_adam_narrow_gparams=6.0)
    share = (1 + 4.2 / 4.9) / 2
    slower: dict[str, Any] = {
        "host_adam_gparams": 4.9,
        "host_adam_weight_gparams": 7.0,
        "host_adam_narrow_gparams": 6.0,
    }
    assert cautious(machine) == replace(machine, **{name: rate * share for name, rate in slower.items()})


def test_of_a_steady_host_all_counts_and_of_an_unknown_one_nearly_all() -> None:
    assert host_share(replace(H100, host_adam_p20_gparams=1.01 * H100.host_adam_gparams)) == 1.0
    assert host_share(replace(H100, host_adam_p20_gparams=None)) == UNKNOWN


def test_a_slower_host_costs_little(profile: ModelProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    careful, late = search(profile, MACHINE), cautious(MACHINE)
    with monkeypatch.context() as patch:
        patch.setattr("protrain.planning.rates.caution.host_share", lambda hardware: 1.0)
        bold, best = search(profile, MACHINE), search(profile, late)
    assert careful.step_ms <= 1.03 * bold.step_ms
    assert check(careful, profile, late).step_ms == best.step_ms
    assert best.step_ms <= 0.95 * check(bold, profile, late).step_ms


def test_what_is_predicted_is_for_the_machine_as_it_is(profile: ModelProfile) -> None:
    plan = search(profile, MACHINE)
    assert plan == check(plan, profile, MACHINE)
    late = check(plan, profile, cautious(MACHINE))
    assert plan.step_ms < late.step_ms
    why = explain(plan, profile, MACHINE)
    assert why.cautious_ms == late.step_ms
    assert "should the host update 7% more slowly" in str(why)
