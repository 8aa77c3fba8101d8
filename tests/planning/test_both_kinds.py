"""Early updates some of which are whole and some of weights alone. See [Note: both kinds]."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware import HardwareProfile
from protrain.planning import MemoryModel, Plan, RuntimeModel, check, evaluate, explain, pack, search
from protrain.planning.explain.explanation import timeline_of
from protrain.planning.runtime.updating import Queue
from protrain.profiler import ModelProfile
from tests.planning.test_brute_force import N as CHUNK
from tests.planning.test_brute_force import as_measured, best_of_all, random_machine, random_profile
from tests.planning.test_runtime import MACHINE, N, make_profile

pytestmark = pytest.mark.usefixtures("one_scenario")
ROOMY = replace(MACHINE, host_bytes=10**12)
COUNTS: dict[str, Any] = {"n_persist": 2, "n_buffer": 2, "n_swap": 0, "n_ckpt": 0, "chunk_elements": N}


def made(hardware: HardwareProfile, n_speculate: int, n_whole: int, **options: Any) -> Plan:
    return evaluate(
        make_profile(3.0, 6.0, n=8),
        hardware,
        n_speculate=n_speculate,
        n_whole=n_whole,
        **{"early_weights": True, **COUNTS, **options},
    )


def test_the_last_are_whole_and_their_gradients_come_first() -> None:
    queue = Queue([(chunk, 10.0) for chunk in range(5)], 4, 0.5, 2)
    assert queue.ordered(4) == [(3, 10.0), (2, 10.0), (1, 5.0), (0, 5.0), (4, 10.0)]
    assert queue.deferred(4) == [(1, 10.0), (0, 10.0)]
    assert queue.ordered(3) == [(3, 10.0), (2, 10.0), (1, 5.0), (0, 10.0), (4, 10.0)]
    assert queue.deferred(3) == [(1, 10.0)]
    assert [list(queue.deferred(in_time)) for in_time in range(3)] == [[], [], []]
    assert queue.in_time(0.0, [0.0] * 5, 21.0) == 3


@pytest.mark.parametrize(("dtype", "whole", "weight"), [("bfloat16", 12, 2), ("float16", 14, 2), ("float32", 12, 4)])
def test_every_kind_takes_its_own_room(dtype: str, whole: int, weight: int) -> None:
    profile = replace(make_profile(3.0, 6.0, n=8), dtype=dtype)
    memory = MemoryModel(profile, ROOMY, pack(profile, N)).making_weights()
    for n_whole in range(6):
        room = N * (n_whole * whole + (5 - n_whole) * weight)
        assert memory.spare_bytes(2, 5, n_whole) == room
        memory.hardware = replace(ROOMY, host_bytes=memory.host_bytes_beside(2, 4000) + room)
        assert memory.most_whole(2, 5, 4000) == n_whole
        memory.hardware = replace(ROOMY, host_bytes=memory.hardware.host_bytes - 1)
        assert memory.most_whole(2, 5, 4000) == n_whole - 1


def test_a_plan_says_how_many_are_whole_and_what_they_take() -> None:
    profile = make_profile(3.0, 6.0, n=8)
    plan = made(ROOMY, 6, 2)
    assert str(plan).endswith("n_speculate=6 n_whole=2")
    assert Plan.from_dict(plan.to_dict()) == plan
    exact = replace(ROOMY, host_bytes=plan.host_bytes)
    assert check(plan, profile, exact) == plan
    with pytest.raises(PlanError, match="host") as refused:
        check(plan, profile, replace(exact, host_bytes=exact.host_bytes - 1))
    assert refused.value.needed_bytes == plan.host_bytes
    why = explain(plan, profile, exact)
    assert why.host_parts["second weights for early updates"] == 4 * N * 2
    assert why.host_parts["second copies for early updates"] == 2 * N * 12
    assert sum(why.host_parts.values()) == plan.host_bytes
    assert min(why.host_parts.values()) >= 0
    names = {operation.name for operation in timeline_of(plan, profile, ROOMY).operations}
    done = Counter(name.rpartition(" ")[0] for name in names)
    assert (done["early update"], done["early weight"], done["deferred update"]) == (2, 4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"early_weights": False}, "n_whole must be 0 without early_weights"),
        ({"n_speculate": 2}, "n_whole must be 0 to 1, fewer than the early updates, not 2"),
        ({"n_whole": -1}, "n_whole must be 0 to 5"),
        ({"n_speculate": 0}, "n_whole must be 0 to 0"),
    ],
)
def test_a_number_of_whole_ones_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(ROOMY, options.pop("n_speculate", 6), options.pop("n_whole", 2), **options)


def test_one_more_or_less_of_them_does_what_the_plan_with_it_does() -> None:
    profile, hardware = make_profile(3.0, 6.0, n=8), replace(ROOMY, host_adam_gparams=0.2)
    changes = {
        (change.knob, change.step): change for change in explain(made(hardware, 6, 2), profile, hardware).changes
    }
    for step in (1, -1):
        change, other = changes["n_whole", step], made(hardware, 6, 2 + step)
        assert (change.step_ms, change.host_bytes) == (pytest.approx(other.step_ms), other.host_bytes)
    assert changes["n_speculate", -1].host_bytes == made(hardware, 5, 2).host_bytes
    assert changes["early_weights", -1].host_bytes == made(hardware, 6, 0, early_weights=False).host_bytes
    least = explain(made(hardware, 2, 1), profile, hardware).changes
    assert next(one for one in least if (one.knob, one.step) == ("n_whole", 1)).impossible


def short_case(seed: int) -> tuple[ModelProfile, HardwareProfile]:
    """Room in host memory for a few whole copies, and a host that has no time to spare."""
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, 8), random.Random(-seed - 1))
    hardware = replace(random_machine(draw), host_adam_gparams=draw.choice([0.3, 0.5, 1.0]), host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, CHUNK))
    copy = memory.layout.buffer_elements(0)[0] * 12
    return profile, replace(hardware, host_bytes=memory.host_bytes_beside(0, 0) + draw.randint(2, 5) * copy)


@pytest.mark.parametrize("seed", [35, 38, 98, 192, 235, 289, 340, 349])
def test_they_are_found_where_they_beat_every_plan_of_one_kind(seed: int) -> None:
    """By brute force; and of all of both kinds that the plan could have had hardly one is better."""
    profile, hardware = short_case(seed)
    found = search(profile, hardware, chunk_elements=CHUNK)
    assert 0 < found.n_whole < found.n_speculate
    assert found.host_bytes <= hardware.host_bytes
    best, _ = best_of_all(MemoryModel(profile, hardware, pack(profile, CHUNK)))
    assert found.step_ms < 0.98 * best
    memory = MemoryModel(profile, hardware, pack(profile, CHUNK), early_weights=True)
    runtime, swapped_bytes = RuntimeModel(memory), memory.swapped_bytes(found.block_modes)
    least = min(
        runtime.step_ms(found.block_modes, found.n_persist, found.n_buffer, n_speculate, 0, n_whole)
        for n_speculate in range(2, len(memory.layout.chunks) - found.n_persist + 1)
        for n_whole in range(1, n_speculate)
        if n_whole <= memory.most_whole(found.n_persist, n_speculate, swapped_bytes)
    )
    assert least <= found.step_ms <= 1.002 * least
