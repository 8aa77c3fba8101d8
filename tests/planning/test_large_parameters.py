"""Chunks of large parameters in either order: what a search of both finds, and what it says where nothing fits."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.common.quantities import parse_bytes
from protrain.hardware import HardwareProfile
from protrain.planning import MemoryModel, Plan, evaluate, explain, search
from protrain.planning.layout import layouts
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import N, as_measured, check_search, random_machine, random_profile


def large_vocabulary(draw: random.Random, *, tied: bool) -> ModelProfile:
    """Random blocks between an embedding of several of them and a head that is as large or tied."""
    profile = as_measured(random_profile(draw, draw.choice([1, 4, 16])), draw)
    parameters = list(profile.parameters)
    for at in (0,) if tied else (0, -1):
        parameters[at] = replace(parameters[at], shape=(draw.choice([2, 3, 5]) * N,))
    units = profile.units
    if tied:
        units = (*units[:-1], replace(units[-1], parameters=(0, *units[-1].parameters)))
    return replace(profile, parameters=tuple(parameters), units=units)


def machine_of(draw: random.Random) -> HardwareProfile:
    """With streamed updates."""
    hardware = replace(random_machine(draw), streamed_adam_gparams=draw.choice([1.0, 3.0, 6.0]))
    return replace(hardware, device_bytes=draw.choice([1, 2]) * hardware.device_bytes)


def search_each(
    profile: ModelProfile, hardware: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> list[Plan | PlanError]:
    """In execution order alone, and with large chunks first alone."""
    found: list[Plan | PlanError] = []
    for layout in layouts(profile):
        with monkeypatch.context() as patched:
            patched.setattr(sys.modules["protrain.planning.search"], "layouts", lambda *_, only=layout: (only,))
            try:
                found.append(search(profile, hardware))
            except PlanError as error:
                found.append(error)
    assert len(found) == 2
    return found


@pytest.mark.parametrize("seed", [15, 33, 41, 83, 97])
@pytest.mark.usefixtures("one_scenario")
def test_no_plan_is_better_in_either_order(seed: int) -> None:
    draw = random.Random(seed)
    profile = large_vocabulary(draw, tied=draw.random() < 0.3)
    hardware, inside = random_machine(draw), draw.random() < 0.3
    hardware = replace(hardware, device_bytes=2 * hardware.device_bytes, host_bytes=2 * hardware.host_bytes)
    check_search(profile, hardware, inside=inside)


# The plan has streamed updates: 139; weight-only updates: 116; swapped blocks: 49, 453.
@pytest.mark.parametrize(("seed", "large_first"), [(139, True), (49, True), (116, True), (608, False), (453, False)])
def test_the_faster_order_is_found(seed: int, large_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    profile, hardware = large_vocabulary(draw, tied=False), machine_of(draw)
    each = search_each(profile, hardware, monkeypatch)
    found = search(profile, hardware)
    assert found == each[large_first]
    other = each[not large_first]
    assert isinstance(other, Plan)
    assert other.step_ms > 1.05 * found.step_ms


@pytest.mark.parametrize(("seed", "large_first"), [(271, False), (348, True)])
def test_the_order_that_fits_is_found(seed: int, large_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    profile, hardware = large_vocabulary(draw, tied=False), machine_of(draw)
    each = search_each(profile, hardware, monkeypatch)
    assert isinstance(each[not large_first], PlanError)
    assert search(profile, hardware) == each[large_first]


@pytest.mark.parametrize(("seed", "large_first"), [(97, True), (152, True), (105, False), (205, False)])
def test_what_would_fit_is_what_is_missing_least(seed: int, large_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    profile = large_vocabulary(draw, tied=False)
    hardware = random_machine(draw)
    each = search_each(profile, hardware, monkeypatch)
    with pytest.raises(PlanError) as caught:
        search(profile, hardware)
    assert str(caught.value) == str(each[large_first])
    assert str(each[0]) != str(each[1])
    amount = r"([\d.]+[KMG]iB)"
    for error in each:
        for text in re.findall(f"{amount} of device_memory|device_memory of at least {amount}", str(error)):
            enough = parse_bytes("".join(text))
            assert enough > hardware.device_bytes
            host_bytes = hardware.host_bytes
            if both := re.search(f"with host_memory of at least {amount}", str(error)):
                host_bytes = parse_bytes(both[1])
            search(profile, replace(hardware, device_bytes=enough, host_bytes=host_bytes))


@pytest.mark.parametrize(("n_persist", "n_buffer"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("large_first", [False, True])
def test_an_explanation_says_what_the_other_order_would_do(n_persist: int, n_buffer: int, large_first: bool) -> None:
    """With the buffers that it then can have."""
    draw = random.Random(257)
    profile = large_vocabulary(draw, tied=False)
    hardware = replace(machine_of(draw), device_bytes=10**12, host_bytes=10**12)

    def made(n_buffer: int, *, large_first: bool) -> Plan:
        most = MemoryModel(profile, hardware, layouts(profile)[large_first]).all_buffers(n_persist)
        n_buffer, n_ckpt = min(n_buffer, most), len(profile.blocks)
        counts: dict[str, Any] = {"n_persist": n_persist, "n_buffer": n_buffer, "n_swap": 0, "n_ckpt": n_ckpt}
        return evaluate(profile, hardware, **counts, large_first=large_first)

    plan = made(n_buffer, large_first=large_first)
    other = made(plan.n_buffer, large_first=not large_first)
    (change,) = (change for change in explain(plan, profile, hardware).changes if change.knob == "large_first")
    assert change.step == (-1 if large_first else 1)
    assert change.counts[:2] == (n_persist, other.n_buffer)
    assert (change.step_ms, change.device_bytes, change.host_bytes) == (
        pytest.approx(other.step_ms),
        other.device_bytes,
        other.host_bytes,
    )
    tied = large_vocabulary(random.Random(257), tied=True)
    plan = evaluate(tied, hardware, n_persist=1, n_buffer=2, n_swap=0, n_ckpt=0)
    assert "large_first" not in {change.knob for change in explain(plan, tied, hardware).changes}
