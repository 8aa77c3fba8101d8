"""The largest depth and the fastest batches, held against the search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Largest, Plan, fastest_batches, largest, search, sweeps
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import MIB, equal_blocks, machine, profile_of

ELEMENTS = 8 * MIB  # of a block


def blocks(n: int, *, movable: bool = True) -> ModelProfile:
    """``n`` blocks whose inputs stay alive from forward to backward, or are offloaded if they are ``movable``."""
    saved = 64 * MIB
    records = equal_blocks(n, 5.0, 10.0, saved, forward_flops=10**11, input_bytes=saved // 16 if movable else 0)
    segments = [("forward", at, saved // 16 * at, 2 * saved, 5.0) for at in range(n)]
    segments += [("backward", at, saved // 16 * at, 2 * saved, 15.0) for at in reversed(range(n))]
    units = [(at, (at,)) for at in range(n)]
    return profile_of([(ELEMENTS, at % 2) for at in range(n)], units, records, segments)


@pytest.mark.parametrize(
    ("hardware", "movable", "where"),
    [
        (machine("1GiB", "1GiB"), True, "host"),
        (machine("512MiB", "100GiB"), False, "GPU"),  # inputs of checkpointed blocks fill the device first
        (machine("512MiB", 6000 * MIB), True, "host"),
    ],
)
def test_the_largest_depth_has_a_plan_and_the_next_has_none(
    hardware: HardwareProfile, movable: bool, where: str
) -> None:
    asked = []

    def profile_of_depth(layers: int) -> ModelProfile:
        asked.append(layers)
        return blocks(layers, movable=movable)

    found = largest(profile_of_depth, hardware, most_layers=200)
    assert 4 < found.layers < 200
    assert found.plan.step_ms <= 1.25 * search(blocks(found.layers, movable=movable), hardware).step_ms
    assert found.plan.device_bytes <= hardware.device_bytes
    assert found.plan.host_bytes <= hardware.host_bytes
    assert found.parameters == found.layers * ELEMENTS
    with pytest.raises(PlanError) as raised:
        search(blocks(found.layers + 1, movable=movable), hardware)
    assert raised.value.where == where
    assert where in found.one_more
    assert len(set(asked)) == len(asked) <= 8, "a profile takes seconds"
    assert Largest.from_json(found.to_json()) == found


def test_the_search_for_depth_ends_somewhere() -> None:
    found = largest(blocks, machine("80GiB", "80GiB"), most_layers=12)
    assert (found.layers, found.one_more) == (12, "")
    assert "not tried" in found.table()
    assert largest(blocks, machine("80GiB", "80GiB"), most_layers=1).layers == 1


def test_a_machine_too_small_for_one_layer_says_so() -> None:
    with pytest.raises(PlanError, match="GPU memory"):
        largest(blocks, machine("64MiB", "4GiB"))


def test_ranks_are_planned_together() -> None:
    two = machine("3.2GiB", "1.5GiB", world_size=2)
    alone = machine(two.device_bytes - two.collective_bytes, two.host_bytes)
    deepest = [largest(blocks, hardware, most_layers=60) for hardware in (alone, two)]
    assert 1.3 * deepest[0].layers < deepest[1].layers < 60
    assert deepest[1].plan.world_size == 2


@pytest.mark.parametrize(
    ("step_ms", "n_sequences", "fastest_first"),
    [
        ({1: 9, 2: 8, 4: 7, 8: 6, 16: 5, 32: 4, 64: 5}, 64, [32, 16, 64, 8, 4]),  # ends where it is slower again
        ({1: 9, 2: 4, 4: 5, 8: 6, 16: 7}, 64, [2, 4, 8, 16, 1]),
        ({1: 9, 2: 8}, 64, [2, 1]),  # where no larger one fits
        ({2: 800, 4: 799, 8: 800, 16: 801}, 64, [8, 4, 16]),  # which hardly differ
        ({1: 9, 2: 8, 4: 7, 8: 6, 16: 5}, 5, [4, 2]),  # that a step has room for
        ({}, 64, []),
    ],
)
def test_the_batch_doubles_or_halves_while_that_is_faster(
    step_ms: dict[int, int], n_sequences: int, fastest_first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = machine("8GiB", "4GiB")
    plan = search(blocks(2), roomy)

    def of_batch(n: int) -> ModelProfile:
        return replace(blocks(2), tokens=10 * n, batch_shapes={"ids": (n, 10)})

    def found(profile: ModelProfile, _: HardwareProfile, **__: Any) -> Plan:
        batch = profile.n_sequences
        if batch not in step_ms:
            search(profile, replace(roomy, device_bytes=MIB))
        assert profile.accumulation == n_sequences // batch
        time_ms = step_ms[batch] * batch * profile.accumulation
        return replace(plan, step_ms=time_ms, tokens=profile.tokens, accumulation=profile.accumulation)

    monkeypatch.setattr(sweeps, "search", found)
    assert fastest_batches(of_batch, roomy, first=8, n_sequences=n_sequences) == fastest_first
