"""The search: what it chooses, what it refuses and with which remedy."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.common.tables import parse_memory
from protrain.planning import check, evaluate, search
from protrain.planning.rates import slower_share
from protrain.planning.simulate import Run
from tests.planning.brute_force import large_vocabulary, random_machine
from tests.planning.models import GIB, H100, LONG, MIB, judge_as_calibrated, machine, make_profile, with_host


def test_with_room_for_all_nothing_is_moved() -> None:
    traced = make_profile()
    hardware = machine("80GiB", "100GiB", device_copy_gbps=3000.0, device_adam_gparams=100.0)
    plan = search(traced, hardware)
    assert plan.n_persist == plan.n_chunks
    assert (plan.n_buffer, plan.n_swap, plan.n_ckpt) == (0, 0, 0)
    compute = sum(segment.duration_ms for segment in traced.segments) - 6 * 20.0  # but no recomputation
    flatten = 2 * 2 * traced.n_trainable / (0.86 * 3000e6)
    assert plan.step_ms == pytest.approx(compute + flatten + traced.n_trainable / 100e6, rel=1e-6)


@pytest.mark.parametrize(("device_gparams", "stays"), [(60.0, True), (2.0, False)])
def test_what_fits_stays_unless_moving_saves_much(device_gparams: float, stays: bool) -> None:
    """The host saves 3% of a step where it updates slowly beside the device, and half of it where it does not."""
    traced = make_profile(ms=1.0, elements=64 * MIB)
    hardware = machine("80GiB", "100GiB", device_adam_gparams=device_gparams, host_adam_gparams=4.0)
    plan = search(traced, hardware)
    resident = evaluate(traced, hardware, n_persist=plan.n_chunks, n_buffer=0, n_swap=0, n_ckpt=0)
    tight = replace(hardware, device_bytes=resident.device_bytes - 1)
    moving = search(traced, tight)
    assert moving.step_ms < resident.step_ms
    assert (plan.n_persist == plan.n_chunks) is stays
    assert stays is (moving.step_ms > 0.95 * resident.step_ms)


def test_of_forty_billion_parameters_few_plans_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Run] = []

    def count(*args: Any) -> Run:
        simulated.append(Run(*args))
        return simulated[-1]

    monkeypatch.setattr(sys.modules["protrain.planning.predict"], "Run", count)
    # Blocks as of GPT-2 40 B with 4 x 1,024 tokens.
    traced = make_profile(50, elements=768 * MIB, saved=1729 * MIB, ms=13.0)
    plan = search(traced, machine("80GiB", "700GiB"))
    assert 0 < plan.n_persist < plan.n_chunks
    assert plan.n_speculate > 0
    assert 0 < len(simulated) < 1200


def test_infeasible_on_the_device_names_a_batch_and_memory_that_fit() -> None:
    traced = make_profile(6, saved=2048 * MIB)
    with pytest.raises(PlanError) as raised:
        search(traced, machine("2GiB", "8GiB"))
    error = raised.value
    assert error.where == "GPU"
    assert error.available_bytes == 2 * 1024 * MIB
    assert error.largest_part.startswith("activations")
    text = str(error)
    assert "a batch of " in text
    assert "instead of 8 fits" in text
    assert "Host memory: needed" in text
    batch = int(text.split("a batch of ")[1].split(" ")[0])
    assert 1 <= batch < 8
    smaller = make_profile(6, saved=2048 * MIB * batch // 8)
    assert search(smaller, machine("2GiB", "8GiB")).device_bytes <= 2 * 1024 * MIB
    with pytest.raises(PlanError):
        search(make_profile(6, saved=2048 * MIB * (batch + 1) // 8), machine("2GiB", "8GiB"))


def test_infeasible_model_states_do_not_blame_the_batch() -> None:
    traced = make_profile(6, saved=MIB, elements=512 * MIB)
    with pytest.raises(PlanError) as raised:
        search(traced, machine("2GiB", "80GiB"))
    assert "a batch of" not in str(raised.value)
    assert "chunk" in raised.value.largest_part or "staging" in raised.value.largest_part


def test_a_plan_with_memory_to_spare_loses_little_where_steps_are_clipped() -> None:
    """With 11 persistent chunks a step is 1% shorter, and a clipped one 20% longer."""
    profile = make_profile(20, ms=5.0, elements=64 * MIB, saved=100 * MIB)
    hardware = machine("20GiB", "64GiB", host_adam_gparams=4.0, streamed_adam_gparams=None)
    few = evaluate(profile, hardware, n_persist=11, n_buffer=2, n_swap=0, n_ckpt=0, n_speculate=6)
    found = search(profile, hardware)
    assert few.step_ms < found.step_ms < 1.02 * few.step_ms
    clipped = replace(found, n_speculate=0, n_weight_only=0)
    assert check(clipped, profile, hardware).step_ms < 1.03 * found.step_ms
    assert check(replace(few, n_speculate=0), profile, hardware).step_ms > 1.2 * few.step_ms


@pytest.mark.parametrize("seed", [97, 105, 152, 205])
def test_what_would_fit_is_named_where_nothing_does(seed: int) -> None:
    draw = random.Random(seed)
    profile = large_vocabulary(draw, tied=False)
    hardware = random_machine(draw)
    with pytest.raises(PlanError) as caught:
        search(profile, hardware)
    amount, error = r"([\d.]+[KMG]iB)", str(caught.value)
    for text in re.findall(f"{amount} of device_memory|device_memory of at least {amount}", error):
        enough = parse_memory("".join(text), name="enough")
        assert enough > hardware.device_bytes
        host_bytes = hardware.host_bytes
        if both := re.search(f"with host_memory of at least {amount}", error):
            host_bytes = parse_memory(both[1], name="host")
        search(profile, replace(hardware, device_bytes=enough, host_bytes=host_bytes))


def test_input_offload_makes_fit_what_else_would_not() -> None:
    traced = make_profile(**LONG)
    kept = evaluate(traced, machine("80GiB", "40GiB"), n_persist=0, n_buffer=1, n_swap=0, n_ckpt=16)
    tight = machine(kept.device_bytes - 1, "40GiB")
    plan = search(traced, tight)
    assert plan.n_ckpt_swap > 0
    assert plan.device_bytes < kept.device_bytes
    assert check(plan, traced, tight) == plan
    # With less memory that is not enough either. The error says what is needed with all inputs offloaded but those in
    # use.
    with pytest.raises(PlanError) as raised:
        search(traced, machine("4GiB", "40GiB"))
    least = raised.value.needed_bytes
    assert kept.device_bytes - 17 * 256 * MIB < least < kept.device_bytes - 13 * 256 * MIB
    found = search(traced, machine(least, "40GiB"))
    assert found.device_bytes == least
    with pytest.raises(PlanError):
        search(traced, machine(least - 1, "40GiB"))
    # A host that holds the states and little more has no room for inputs.
    with pytest.raises(PlanError) as raised:
        search(traced, machine(least, kept.host_bytes + 10 * 256 * MIB))
    assert raised.value.where == "host"
    assert raised.value.needed_bytes > kept.host_bytes + 10 * 256 * MIB


STEADY = replace(  # nothing helps its host
    H100, device_bytes=40 * GIB, host_bytes=200 * GIB, host_adam_gparams=4.9, streamed_adam_gparams=None
)


@pytest.mark.slow
def test_the_plan_is_the_fastest_on_the_slower_host_and_loses_little_on_a_host_as_calibrated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The states are more than the device holds, and there is as much work for the host as for the device.
    profile = make_profile(32, elements=208 * 1024**2, saved=1300 * 1024**2, ms=12.0)
    machine, slower = STEADY, with_host(STEADY, slower_share(STEADY))
    careful = search(profile, machine)
    with monkeypatch.context() as patch:
        judge_as_calibrated(patch)
        bold, fastest = (search(profile, one) for one in (machine, slower))
    careful_ms, bold_ms, fastest_ms = (check(plan, profile, slower).step_ms for plan in (careful, bold, fastest))
    assert careful_ms == fastest_ms
    assert careful_ms <= 0.95 * bold_ms
    assert careful.step_ms <= 1.06 * bold.step_ms
