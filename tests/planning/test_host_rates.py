"""Plans are made for the rates that the host may have in a step: see [Note: host-rate scenarios]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.planning import Plan, check, explain, search
from protrain.planning.rates.host_rates import UNKNOWN, host_shares, scenarios, slowest
from protrain.profiler import ModelProfile
from tests.planning.machines import H100
from tests.planning.test_search import make_profile

GIB = 1024**3
MACHINE = replace(  # in calibration its host had 4.2 or less a fifth of the time
    H100, device_bytes=40 * GIB, host_bytes=200 * GIB, host_adam_gparams=4.9, host_adam_p20_gparams=4.2
)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """Blocks whose states are more than the device holds, and as much work for the host as for the device."""
    return make_profile(32, elements=208 * 1024**2, saved=1300 * 1024**2, ms=12.0)


def test_nothing_but_the_host_is_slower() -> None:
    machine = replace(MACHINE, host_adam_weight_gparams=7.0, host_adam_narrow_gparams=6.0)
    usual = (1 + 4.2 / 4.9) / 2
    rates: dict[str, Any] = {
        "host_adam_gparams": 4.9,
        "host_adam_weight_gparams": 7.0,
        "host_adam_narrow_gparams": 6.0,
    }
    found = scenarios(machine)
    for (one, probability), (share, expected) in zip(found, ((1.0, 0.6), (0.89, 0.4)), strict=True):
        assert probability == expected
        assert {name: getattr(one, name) for name in rates} == pytest.approx(
            {name: rate * usual * share for name, rate in rates.items()}
        )
        assert replace(one, **rates) == machine
    assert slowest(machine) == found[-1][0]


def test_a_steady_host_has_its_rate_mostly_and_an_unknown_one_nearly_so() -> None:
    assert host_shares(replace(H100, host_adam_p20_gparams=1.01 * H100.host_adam_gparams))[0] == (1.0, 0.6)
    assert host_shares(replace(H100, host_adam_p20_gparams=None))[0] == (UNKNOWN, 0.6)
    assert host_shares(replace(H100, device_type="cpu")) == ((1.0, 1.0),)


@pytest.mark.parametrize(("device_gib", "host_gib"), [(40, 200), (24, 120)])
def test_the_plan_is_the_fastest_in_the_mean(
    device_gib: int, host_gib: int, profile: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mean_ms(plan: Plan) -> float:
        return sum(share * check(plan, profile, one).step_ms for one, share in machines)

    machine = replace(MACHINE, device_bytes=device_gib * GIB, host_bytes=host_gib * GIB)
    machines = scenarios(machine)
    careful = search(profile, machine)
    with monkeypatch.context() as patch:
        patch.setattr("protrain.planning.rates.host_rates.host_shares", lambda hardware: ((1.0, 1.0),))
        fastest = [search(profile, one) for one, _ in machines]
        bold = search(profile, machine)
    assert mean_ms(careful) <= 1.005 * min(map(mean_ms, fastest))
    assert 0 < careful.n_weight_only < careful.n_speculate
    assert mean_ms(careful) <= 0.98 * mean_ms(bold)
    assert careful.step_ms <= 1.06 * bold.step_ms
    late = machines[-1][0]
    assert check(careful, profile, late).step_ms <= 0.94 * check(bold, profile, late).step_ms


def test_what_is_predicted_is_for_the_machine_as_it_is(profile: ModelProfile) -> None:
    plan = search(profile, MACHINE)
    assert plan == check(plan, profile, MACHINE)
    late = check(plan, profile, slowest(MACHINE))
    assert plan.step_ms < late.step_ms
    why = explain(plan, profile, MACHINE)
    assert why.slowest_ms == late.step_ms
    assert "should the host update 17% more slowly" in str(why)
