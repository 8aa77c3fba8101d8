"""Early updates of weights alone: when they are, what memory they take, and steps that can be worked out by hand."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import pytest

from protrain.common.errors import PlanError
from protrain.hardware import HardwareProfile
from protrain.planning import (
    BlockMode,
    MemoryModel,
    Plan,
    RuntimeModel,
    block_modes,
    check,
    evaluate,
    explain,
    pack,
    search,
)
from protrain.planning.choices import Choices
from protrain.planning.runtime.bounds import Undisturbed
from protrain.planning.runtime.passes import Run
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, UP
from protrain.profiler.model_profile import ModelProfile
from tests.planning.counts import placed
from tests.planning.test_brute_force import N as CHUNK
from tests.planning.test_brute_force import (
    as_measured,
    best_of_all,
    every_plan,
    kinds_of,
    random_machine,
    random_profile,
)
from tests.planning.test_runtime import MACHINE, MOVE, NONE, N, make_profile

# By seed, where that makes the fastest plan faster by more than 2%.
pytestmark = pytest.mark.usefixtures("one_scenario")
SCARCE = (28, 35, 80, 309, 323, 324, 342, 355)


def scarce(profile: ModelProfile, hardware: HardwareProfile, n_weights: int, n_persist: int = 0) -> HardwareProfile:
    """Host memory for that many second weights of full chunks beside all that must be there, in chunks of N."""
    memory = MemoryModel(profile, replace(hardware, host_bytes=10**12), pack(profile, N))
    room = n_weights * N * profile.element_bytes
    return replace(hardware, host_bytes=memory.host_bytes_beside(n_persist, 0) + room)


def runtime_of(profile: ModelProfile, hardware: HardwareProfile) -> RuntimeModel:
    return RuntimeModel(MemoryModel(profile, hardware, pack(profile, N), early_weights=True))


@pytest.mark.parametrize(("dtype", "whole", "weight"), [("bfloat16", 12, 2), ("float16", 14, 2), ("float32", 12, 4)])
def test_second_weights_take_less_than_whole_copies(dtype: str, whole: int, weight: int) -> None:
    profile = replace(make_profile(3.0, 6.0, n=8), dtype=dtype)
    beside = MemoryModel(profile, replace(MACHINE, host_bytes=10**12), pack(profile, N)).host_bytes_beside(2, 5000)
    for n_early in range(7):
        for more in (0, -1):
            hardware = replace(MACHINE, host_bytes=beside + n_early * N * whole + more)
            memory = MemoryModel(profile, hardware, pack(profile, N))
            for kind, size in ((memory, whole), (memory.making_weights(), weight)):
                assert kind.most_early(2, np.array([5000])).tolist() == [
                    0 if beside > hardware.host_bytes else min(6, (hardware.host_bytes - beside) // (N * size))
                ]
                for count in range(7):
                    assert kind.spare_bytes(2, count) == count * N * size


def test_a_plan_says_of_which_kind_its_early_updates_are() -> None:
    profile = make_profile(3.0, 6.0, n=8)
    counts: dict[str, Any] = {"n_persist": 2, "n_buffer": 2, "n_swap": 0, "n_ckpt": 0, "chunk_elements": N}
    tight, roomy = scarce(profile, MACHINE, 6, 2), replace(MACHINE, host_bytes=10**12)
    one = evaluate(profile, tight, n_speculate=1, **counts)
    assert (one.early_weights, str(one).endswith("n_speculate=1")) == (False, True)
    plan = evaluate(profile, tight, n_speculate=6, early_weights=True, **counts)
    assert plan.early_weights
    assert str(plan).endswith("n_speculate=6 (weights)")
    assert plan.host_bytes == tight.host_bytes
    assert explain(plan, profile, tight).host_parts["second weights for early updates"] == 6 * N * 2
    assert check(plan, profile, roomy) == plan
    whole = evaluate(profile, roomy, n_speculate=6, **counts)
    assert whole.host_bytes - plan.host_bytes == 6 * N * 10
    for other in (whole, replace(plan, early_weights=False)):
        with pytest.raises(PlanError, match="host"):
            check(other, profile, tight)
    assert not evaluate(profile, tight, n_speculate=0, early_weights=True, **counts).early_weights
    with pytest.raises(PlanError, match="host"):
        check(plan, profile, replace(tight, host_bytes=tight.host_bytes - 1))
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("seed", [323, 324, 342])
def test_they_are_made_where_there_is_room_for_whole_copies_too(seed: int) -> None:
    """The update of a weight takes less time, so that more are done when backward is over."""
    profile, hardware = tight_case(seed)
    hardware = replace(hardware, host_bytes=10**12)
    best, whole = best_of_all(MemoryModel(profile, hardware, pack(profile, CHUNK)))
    found = search(profile, hardware, chunk_elements=CHUNK)
    assert found.early_weights
    assert best <= found.step_ms < 0.99 * whole


def steps_of(update_ms: float, room: int = 7) -> tuple[RuntimeModel, list[float]]:
    """Of eight blocks of 2 and 20 ms, the first persistent, by early updates, with room for so many second weights."""
    profile = make_profile(2.0, 20.0, n=8)
    hardware = replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / update_ms)
    runtime = runtime_of(profile, scarce(profile, hardware, room, 1))
    return runtime, [runtime.step_ms((NONE,) * 8, placed(1, 7, early)) for early in range(room + 1)]


def test_a_step_waits_for_weights_and_not_for_states() -> None:
    # An update takes 13 ms, of its weight alone 8 (16 of 26 bytes). Without, seven of them, the last chunk up and used.
    _, steps = steps_of(13.0)
    backward_ms, states_ms = 8 * 20.0, 7 * 13.0
    assert steps[0] == pytest.approx(states_ms + MOVE + 2.0 + backward_ms + 0.01, abs=0.01)
    # With three, the last four wait as before.
    assert steps[3] == pytest.approx(4 * 13.0 + MOVE + 2.0 + backward_ms + 0.01, abs=0.01)
    # With six or seven all seven chunks go up before the last block is used.
    for early in (6, 7):
        assert steps[early] == pytest.approx(7 * MOVE + 2.0 + backward_ms + 0.01, abs=0.01)


def test_deferred_updates_come_last_and_hold_up_the_next_gradients() -> None:
    runtime, steps = steps_of(34.0)
    found = runtime.timeline((NONE,) * 8, placed(1, 7, 6))
    assert found.step_ms == steps[6]
    begun = [one for one in found.operations if one.lane == HOST and one.start_ms > 0.0]
    order = [one.name for one in begun]
    deferred = [f"deferred update {chunk}" for chunk in (6, 5, 4, 3, 2, 1)]
    assert order[:7] == ["update 7", *deferred]
    assert order[7:13] == [f"early weight {chunk}" for chunk in (6, 5, 4, 3, 2, 1)]
    assert order[13:] == order[:7]
    for one in begun:
        share = 16 / 26 if one.name.startswith("early weight") else 1.0
        assert one.end_ms - one.start_ms == pytest.approx(34.0 * share, rel=1e-6)
    # A backward takes 20 ms and an update 34: from the third gradient on each is flattened, and then the device waits.
    down = {one.name: one.start_ms for one in found.operations if one.lane == DOWN}
    done = {one.name: one.end_ms for one in begun[:7]}
    assert down["gradients 6"] > done["deferred update 6"]
    device = [one for one in found.operations if one.lane == GPU]
    for chunk in (5, 4, 3, 2, 1):
        end = done[f"deferred update {chunk}"]
        assert down[f"gradients {chunk}"] == end
        at = next(at for at, one in enumerate(device) if one.name == f"flatten {chunk}")
        assert device[at].end_ms < end
        assert device[at + 1].start_ms == end


def test_what_is_not_begun_in_time_is_whole_and_nothing_of_it_deferred() -> None:
    # Of weights that take 24 ms each and come every 20 the last is not begun when backward is over.
    runtime, _ = steps_of(39.0)
    found = runtime.timeline((NONE,) * 8, placed(1, 7, 7))
    names = [one.name for one in found.operations if one.lane == HOST]
    at = len(names) - 1 - names[::-1].index("update 1")
    assert names[at - 1] == "early weight 2"
    assert names[at + 1 :] == [f"deferred update {chunk}" for chunk in range(7, 1, -1)]


def test_a_timeline_with_deferred_updates_does_one_thing_at_a_time() -> None:
    runtime, _ = steps_of(26.0)
    for early in (1, 4, 7):
        found = runtime.timeline((BlockMode.SWAP, BlockMode.CKPT) * 4, placed(1, 3, early))
        lanes = defaultdict(list)
        for one in found.operations:
            lanes[one.lane].append((one.start_ms, one.end_ms))
        assert set(lanes) == {GPU, UP, DOWN, HOST}
        for intervals in lanes.values():
            assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(sorted(intervals)))


def tight_case(seed: int) -> tuple[ModelProfile, HardwareProfile]:
    """Room in host memory for some second weights and hardly a whole copy, and where updates matter."""
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, draw.choice([4, 8, 16])), random.Random(-seed - 1))
    hardware = replace(random_machine(draw), host_adam_gparams=draw.choice([0.5, 1.0, 2.0]), host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, CHUNK))
    beside = memory.host_bytes_beside(draw.randint(0, 1), 0)
    return profile, replace(
        hardware, host_bytes=beside + draw.randint(1, 8) * memory.layout.buffer_elements(0)[0] * profile.element_bytes
    )


@pytest.mark.parametrize("update_ms", [13.0, 34.0, 50.0])
def test_what_the_host_cannot_do_in_a_step_makes_steps_longer(update_ms: float) -> None:
    """Deferred updates pile up, which two steps do not show."""
    runtime, steps = steps_of(update_ms)
    for early in range(8):
        first = Run.of(runtime._step((NONE,) * 8, placed(1, 7, early)))
        run = Run(first.step, [repeat(1.0)] * len(LANES), 0.0)
        run.in_time = first.in_time
        ends = []
        for _ in range(60):
            run.forward()
            run.backward()
            run.update()
            ends.append(run.free[GPU])
        assert (ends[-1] - ends[-21]) / 20 == pytest.approx(steps[early], rel=1e-3)
    assert first.in_time is not None
    work_ms = update_ms * (7 + first.in_time[0] * 16 / 26)
    assert (steps[7] == pytest.approx(work_ms)) is (update_ms > 13.0)


def test_what_a_weight_takes_is_calibrated() -> None:
    """In bf16; of others as much more than by their bytes."""
    measured = replace(MACHINE, host_adam_weight_gparams=MACHINE.host_adam_gparams * 1.25)  # 1.625 by its bytes
    for dtype, share in (
        ("bfloat16", 0.8),
        ("float16", 16 / 28 / (16 / 26) * 0.8),
        ("float32", 20 / 28 * 26 / 16 * 0.8),
    ):
        profile = replace(make_profile(2.0, 20.0, n=8), dtype=dtype)
        step = runtime_of(profile, scarce(profile, measured, 3, 1))._step((NONE,) * 8, placed(1, 7, 3))
        assert step.host.weight_share == pytest.approx(share)


@pytest.mark.parametrize("room", [3, 5, 7])
@pytest.mark.parametrize("update_ms", [13.0, 34.0, 39.0, 50.0])
def test_as_many_are_chosen_as_take_least(update_ms: float, room: int) -> None:
    runtime, steps = steps_of(update_ms, room)
    step_ms, early = runtime.fitted_ms((NONE,) * 8, 1, 7, room)
    assert step_ms == steps[early] == pytest.approx(min(steps), abs=1e-6)


def test_the_number_of_early_weights_has_a_least() -> None:
    _, steps = steps_of(50.0)
    assert steps[3] == min(steps)


@pytest.mark.parametrize("seed", range(225, 250))  # those that gain more than 1%: 230, 243, 245
def test_no_plan_is_better_where_host_memory_is_short(seed: int) -> None:
    profile, hardware = tight_case(seed)
    memory = MemoryModel(profile, hardware, pack(profile, CHUNK))
    best = min(fastest_ms(kind) for kind in kinds_of(memory, inside=False))
    found = search(profile, hardware, chunk_elements=CHUNK)
    assert found.step_ms <= 1.01 * best
    assert found.n_whole or best <= found.step_ms


def fastest_ms(memory: MemoryModel) -> float:
    """The step time of the fastest plan that fits."""
    runtime, best = RuntimeModel(memory), float("inf")
    undisturbed: dict[tuple[BlockMode, ...], Undisturbed] = {}
    for n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, early in every_plan(memory, inside=False):
        modes = block_modes(len(memory.profile.blocks), n_swap, n_ckpt, n_ckpt_swap)
        if modes not in undisturbed:
            undisturbed[modes] = runtime.undisturbed(Choices.of([modes]))
        if runtime.bound_ms(undisturbed[modes], n_persist, n_buffer, early)[0] < best:
            best = min(best, runtime.step_ms(modes, placed(n_persist, n_buffer, early), limit_ms=best))
    return best


@pytest.mark.parametrize("seed", SCARCE)
def test_early_weights_are_found_that_come_close_to_the_best(seed: int) -> None:
    profile, hardware = tight_case(seed)
    best, whole = best_of_all(MemoryModel(profile, hardware, pack(profile, CHUNK)))
    found = search(profile, hardware, chunk_elements=CHUNK)
    assert found.early_weights
    assert best <= found.step_ms < 0.99 * whole
    assert found.step_ms <= 1.01 * best
    assert found.host_bytes <= hardware.host_bytes
    assert check(found, profile, hardware) == found
