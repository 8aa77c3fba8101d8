"""Plans are made for a host that is slower than usual: see [Note: the slower host]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.planning import Plan, check, explain, search
from protrain.planning.rates import UNKNOWN, slower_share, with_host
from protrain.profiler.model_profile import ModelProfile
from tests.planning.machines import H100, judge_as_calibrated
from tests.planning.test_search import make_profile

GIB = 1024**3
MACHINE = replace(  # in calibration its host had 4.2 or less a fifth of the time; nothing helps it
    H100,
    device_bytes=40 * GIB,
    host_bytes=200 * GIB,
    host_adam_gparams=4.9,
    host_adam_p20_gparams=4.2,
    streamed_adam_gparams=None,
)
SLOWER = 0.89  # of the usual rate


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    """Blocks whose states are more than the device holds, and as much work for the host as for the device."""
    return make_profile(32, elements=208 * 1024**2, saved=1300 * 1024**2, ms=12.0)


def test_nothing_but_the_host_is_slower() -> None:
    machine = replace(MACHINE, host_adam_weight_gparams=7.0, host_adam_narrow_gparams=6.0)
    rates: dict[str, Any] = {
        "host_adam_gparams": 4.9,
        "host_adam_weight_gparams": 7.0,
        "host_adam_narrow_gparams": 6.0,
    }
    slower = with_host(machine, 0.8)
    assert {name: getattr(slower, name) for name in rates} == pytest.approx(
        {name: rate * 0.8 for name, rate in rates.items()}
    )
    assert replace(slower, **rates) == machine
    unknown = with_host(replace(machine, host_adam_weight_gparams=None, host_adam_narrow_gparams=None), 0.8)
    assert unknown.host_adam_weight_gparams is unknown.host_adam_narrow_gparams is None


def test_how_much_slower_depends_on_how_steady_the_host_was_in_calibration() -> None:
    assert slower_share(MACHINE) == pytest.approx(SLOWER * (1 + 4.2 / 4.9) / 2)
    assert slower_share(replace(MACHINE, host_adam_p20_gparams=1.01 * 4.9)) == pytest.approx(SLOWER)
    assert slower_share(replace(MACHINE, host_adam_p20_gparams=None)) == pytest.approx(SLOWER * UNKNOWN)
    assert slower_share(replace(MACHINE, device_type="cpu")) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("device_gib", "host_gib"), [(40, 200), (24, 120)])
def test_the_plan_is_the_fastest_on_the_slower_host_and_loses_little_on_a_host_as_calibrated(
    device_gib: int, host_gib: int, profile: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(MACHINE, device_bytes=device_gib * GIB, host_bytes=host_gib * GIB)
    slower = with_host(machine, slower_share(machine))
    careful = search(profile, machine)
    with monkeypatch.context() as patch:
        judge_as_calibrated(patch)
        bold, fastest = (search(profile, one) for one in (machine, slower))
    careful_ms, bold_ms, fastest_ms = (check(plan, profile, slower).step_ms for plan in (careful, bold, fastest))
    assert careful_ms == fastest_ms
    assert careful_ms <= 0.95 * bold_ms
    assert careful.step_ms <= 1.06 * bold.step_ms


def test_what_is_predicted_is_for_the_machine_as_it_is(profile: ModelProfile) -> None:
    plan = search(profile, MACHINE)
    assert plan == check(plan, profile, MACHINE)
    late: Plan = check(plan, profile, with_host(MACHINE, slower_share(MACHINE)))
    assert plan.step_ms < late.step_ms
    why = explain(plan, profile, MACHINE)
    assert why.slower_ms == late.step_ms
    assert why.slower_share == slower_share(MACHINE)
    assert "should the host update 17% more slowly" in str(why)
