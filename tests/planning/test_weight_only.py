"""Speculative updates of the weight alone: the memory that they take, and steps that can be worked out by hand.

See [Note: weight-only updates] in ``protrain.planning.step``.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, Plan, RuntimeModel, check, evaluate, explain, pack, predict
from protrain.planning.simulate import Run
from protrain.planning.step import UpdateQueue
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, UP
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import N as CHUNK
from tests.planning.brute_force import as_measured, check_search, fastest_ms, random_machine, random_profile
from tests.planning.counts import placed
from tests.planning.test_runtime import MACHINE, MOVE, NONE, N, make_profile

pytestmark = pytest.mark.usefixtures("judged_as_calibrated")
# By seed, where weight-only updates make the fastest plan faster by more than 2%.
SCARCE = (28, 323)
ROOMY = replace(MACHINE, host_bytes=10**12)
COUNTS: dict[str, Any] = {"n_persist": 2, "n_buffer": 2, "n_swap": 0, "n_ckpt": 0, "chunk_elements": N}
# Bytes a parameter of a whole second copy, and of one of the weight alone.
SIZES = [("bfloat16", 12, 2), ("float16", 14, 2), ("float32", 12, 4)]


def made(hardware: HardwareProfile, n_speculate: int, n_weight_only: int) -> Plan:
    profile = make_profile(3.0, 6.0, n=8)
    return evaluate(profile, hardware, n_speculate=n_speculate, n_weight_only=n_weight_only, **COUNTS)


# -- memory ------------------------------------------------------------------------------------------------------------


def with_weights(profile: ModelProfile, hardware: HardwareProfile, n_weights: int, n_persist: int) -> HardwareProfile:
    """Host memory for that many second weights of full chunks beside all that must be there, in chunks of N."""
    memory = MemoryModel(profile, ROOMY, pack(profile, N))
    room = n_weights * N * profile.element_bytes
    return replace(hardware, host_bytes=memory.least_host_bytes(n_persist, 0) + room)


@pytest.mark.parametrize(("dtype", "whole", "weight"), SIZES)
def test_second_weights_take_less_than_whole_copies(dtype: str, whole: int, weight: int) -> None:
    profile = replace(make_profile(3.0, 6.0, n=8), dtype=dtype)
    beside = MemoryModel(profile, ROOMY, pack(profile, N)).least_host_bytes(2, 5000)
    for n_whole in range(7):
        for more in (0, -1):
            room = n_whole * N * whole + more
            memory = MemoryModel(profile, replace(MACHINE, host_bytes=beside + room), pack(profile, N))
            assert memory.speculation(2, 8, 5000, whole=True) == (max(0, room) // (N * whole), 0)
            assert memory.speculation(2, 8, 5000)[0] == max(0, min(6, room // (N * weight)))
            for count in range(7):
                assert memory.copy_bytes(2, count) == count * N * whole
                assert memory.copy_bytes(2, count, count) == count * N * weight


@pytest.mark.parametrize(("dtype", "whole", "weight"), SIZES)
def test_as_few_are_weight_only_as_host_memory_allows(dtype: str, whole: int, weight: int) -> None:
    profile = replace(make_profile(3.0, 6.0, n=8), dtype=dtype)
    memory = MemoryModel(profile, ROOMY, pack(profile, N))
    for n_weight_only in range(6):
        room = N * ((5 - n_weight_only) * whole + n_weight_only * weight)
        assert memory.copy_bytes(2, 5, n_weight_only) == room
        memory.hardware = replace(ROOMY, host_bytes=memory.least_host_bytes(2, 4000) + room)
        assert memory.speculation(2, 5, 4000) == (5, n_weight_only)
        memory.hardware = replace(ROOMY, host_bytes=memory.hardware.host_bytes - 1)
        assert memory.speculation(2, 5, 4000) == ((5, n_weight_only + 1) if n_weight_only < 5 else (4, 4))


def test_a_plan_of_second_weights_fits_where_one_of_whole_copies_does_not() -> None:
    profile = make_profile(3.0, 6.0, n=8)
    tight = with_weights(profile, MACHINE, 6, 2)
    assert str(made(tight, 1, 0)).endswith("n_speculate=1")
    plan = made(tight, 6, 6)
    assert str(plan).endswith("n_speculate=6 n_weight_only=6")
    assert plan.host_bytes == tight.host_bytes
    parts = explain(plan, profile, tight).host_bytes
    assert parts["second weights for speculative updates"] == 6 * N * 2
    assert "second copies for speculative updates" not in parts
    assert check(plan, profile, ROOMY) == plan
    whole = made(ROOMY, 6, 0)
    assert whole.host_bytes - plan.host_bytes == 6 * N * 10
    for other in (whole, replace(plan, n_weight_only=0)):
        with pytest.raises(PlanError, match="host"):
            check(other, profile, tight)
    with pytest.raises(PlanError, match="host"):
        check(plan, profile, replace(tight, host_bytes=tight.host_bytes - 1))
    assert Plan.from_dict(plan.to_dict()) == plan


def test_a_plan_says_how_many_are_weight_only_and_what_they_take() -> None:
    profile = make_profile(3.0, 6.0, n=8)
    plan = made(ROOMY, 6, 4)
    assert str(plan).endswith("n_speculate=6 n_weight_only=4")
    assert Plan.from_dict(plan.to_dict()) == plan
    exact = replace(ROOMY, host_bytes=plan.host_bytes)
    assert check(plan, profile, exact) == plan
    with pytest.raises(PlanError, match="host") as refused:
        check(plan, profile, replace(exact, host_bytes=exact.host_bytes - 1))
    assert refused.value.needed_bytes == plan.host_bytes
    why = explain(plan, profile, exact)
    assert why.host_bytes["second weights for speculative updates"] == 4 * N * 2
    assert why.host_bytes["second copies for speculative updates"] == 2 * N * 12
    assert sum(why.host_bytes.values()) == 2 * plan.host_bytes  # the whole, and its parts
    assert min(why.host_bytes.values()) >= 0
    names = {operation.name for operation in predict(profile, ROOMY, plan).timeline.operations}
    done = Counter(name.rpartition(" ")[0] for name in names)
    assert (done["speculative update"], done["speculative weight"], done["deferred update"]) == (2, 4, 4)


@pytest.mark.parametrize(
    ("n_speculate", "n_weight_only", "message"),
    [
        (6, 7, "n_weight_only must be 0 to 6, not 7: no other update is speculative"),
        (6, -1, "n_weight_only must be 0 to 6, not -1"),
        (0, 1, "n_weight_only must be 0 to 0, not 1"),
    ],
)
def test_a_number_of_weight_only_updates_out_of_range_is_refused(
    n_speculate: int, n_weight_only: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(ROOMY, n_speculate, n_weight_only)


def test_one_more_or_less_of_them_does_what_the_plan_with_it_does() -> None:
    profile, hardware = make_profile(3.0, 6.0, n=8), replace(ROOMY, host_adam_gparams=0.2)
    why = explain(made(hardware, 6, 4), profile, hardware)
    changes = {(change.knob, change.step): change for change in why.changes}
    for step in (1, -1):
        change, other = changes["n_weight_only", step], made(hardware, 6, 4 + step)
        assert (change.step_ms, change.host_bytes) == (pytest.approx(other.step_ms), other.host_bytes)
    assert changes["n_speculate", -1].host_bytes == made(hardware, 5, 4).host_bytes

    def impossible(plan: Plan, step: int, machine: HardwareProfile = hardware) -> str:
        changes = explain(plan, profile, machine).changes
        return next(one.impossible for one in changes if (one.knob, one.step) == ("n_weight_only", step))

    assert impossible(made(hardware, 2, 2), 1) == "no other update is speculative"
    assert impossible(made(hardware, 2, 0), -1) == "there is none to give up"
    plan = made(hardware, 6, 4)
    exact = replace(hardware, host_bytes=plan.host_bytes)
    assert impossible(plan, -1, exact) == "host memory has no room for another whole second copy"


# -- order and time ----------------------------------------------------------------------------------------------------


def test_the_last_are_whole_and_their_gradients_come_first() -> None:
    queue = UpdateQueue([(chunk, 10.0) for chunk in range(5)], 4, 2, 0.5)
    assert queue.ordered(4) == [(3, 10.0), (2, 10.0), (1, 5.0), (0, 5.0), (4, 10.0)]
    assert queue.deferred(4) == [(1, 10.0), (0, 10.0)]
    assert queue.ordered(3) == [(3, 10.0), (2, 10.0), (1, 5.0), (0, 10.0), (4, 10.0)]
    assert queue.deferred(3) == [(1, 10.0)]
    assert [list(queue.deferred(in_time)) for in_time in range(3)] == [[], [], []]
    assert queue.in_time(0.0, [0.0] * 5, 21.0) == 3


def steps_of(update_ms: float, room: int = 7) -> tuple[RuntimeModel, list[float]]:
    """The model and its steps by the number of weight-only updates, with room for so many second weights.

    Of eight blocks with a forward of 2 and a backward of 20 ms, the first persistent.
    """
    profile = make_profile(2.0, 20.0, n=8)
    hardware = replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / update_ms)
    runtime = RuntimeModel(MemoryModel(profile, with_weights(profile, hardware, room, 1), pack(profile, N)))
    return runtime, [runtime.step_ms((NONE,) * 8, weight_only(1, 7, n)) for n in range(room + 1)]


def weight_only(n_persist: int, n_buffer: int, n_speculate: int) -> Any:
    """Counts whose speculative updates compute their weight alone."""
    return placed(n_persist, n_buffer, n_speculate, n_weight_only=n_speculate)


def test_a_step_waits_for_weights_and_not_for_states() -> None:
    # An update takes 13 ms, of its weight alone 8 (16 of 26 bytes). Without speculative updates seven whole ones, the
    # upload of the last chunk and its use follow each other.
    _, steps = steps_of(13.0)
    backward_ms, states_ms = 8 * 20.0, 7 * 13.0
    assert steps[0] == pytest.approx(states_ms + MOVE + 2.0 + backward_ms + 0.01, abs=0.01)
    # With three the last four wait as before.
    assert steps[3] == pytest.approx(4 * 13.0 + MOVE + 2.0 + backward_ms + 0.01, abs=0.01)
    # With six or seven all seven chunks go up before the last block is used.
    for n_speculate in (6, 7):
        assert steps[n_speculate] == pytest.approx(7 * MOVE + 2.0 + backward_ms + 0.01, abs=0.01)


def test_deferred_updates_come_last_and_hold_up_the_next_gradients() -> None:
    runtime, steps = steps_of(34.0)
    found = runtime.timeline((NONE,) * 8, weight_only(1, 7, 6))
    assert found.step_ms == steps[6]
    begun = [one for one in found.operations if one.lane == HOST and one.start_ms > 0.0]
    order = [one.name for one in begun]
    deferred = [f"deferred update {chunk}" for chunk in (6, 5, 4, 3, 2, 1)]
    assert order[:7] == ["update 7", *deferred]
    assert order[7:13] == [f"speculative weight {chunk}" for chunk in (6, 5, 4, 3, 2, 1)]
    assert order[13:] == order[:7]
    for one in begun:
        share = 16 / 26 if one.name.startswith("speculative weight") else 1.0
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


def test_an_update_that_does_not_begin_in_time_is_whole_and_nothing_of_it_is_deferred() -> None:
    # Updates of the weight take 24 ms each and gradients come every 20 ms: the last update has not begun when backward
    # is over.
    runtime, _ = steps_of(39.0)
    found = runtime.timeline((NONE,) * 8, weight_only(1, 7, 7))
    names = [one.name for one in found.operations if one.lane == HOST]
    at = len(names) - 1 - names[::-1].index("update 1")
    assert names[at - 1] == "speculative weight 2"
    assert names[at + 1 :] == [f"deferred update {chunk}" for chunk in range(7, 1, -1)]


def test_a_timeline_with_deferred_updates_does_one_thing_at_a_time() -> None:
    runtime, _ = steps_of(26.0)
    for n_speculate in (1, 4, 7):
        found = runtime.timeline((BlockMode.SWAP, BlockMode.CKPT) * 4, weight_only(1, 3, n_speculate))
        lanes = defaultdict(list)
        for one in found.operations:
            lanes[one.lane].append((one.start_ms, one.end_ms))
        assert set(lanes) == {GPU, UP, DOWN, HOST}
        for intervals in lanes.values():
            assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(sorted(intervals)))


@pytest.mark.parametrize("update_ms", [13.0, 34.0, 50.0])
def test_what_the_host_cannot_do_in_a_step_makes_steps_longer(update_ms: float) -> None:
    """Deferred updates pile up over many steps, which two steps do not show."""
    runtime, steps = steps_of(update_ms)
    for n_speculate in range(8):
        first = Run.of(runtime.steps.step((NONE,) * 8, weight_only(1, 7, n_speculate)))
        run = Run(first.step, [repeat(1.0)] * len(LANES))
        run.choices = first.choices
        ends = []
        for _ in range(60):
            run.forward()
            run.backward()
            run.update()
            ends.append(run.free[GPU])
        assert (ends[-1] - ends[-21]) / 20 == pytest.approx(steps[n_speculate], rel=1e-3)
    assert first.choices is not None
    work_ms = update_ms * (7 + first.choices.n_in_time * 16 / 26)
    assert (steps[7] == pytest.approx(work_ms)) is (update_ms > 13.0)


def test_what_a_weight_takes_is_calibrated() -> None:
    """Calibration has bf16; another dtype takes as much longer as it moves more bytes."""
    measured = replace(MACHINE, host_adam_weight_gparams=MACHINE.host_adam_gparams * 1.25)  # 1.625 by its bytes
    for dtype, share in (
        ("bfloat16", 0.8),
        ("float16", 16 / 28 / (16 / 26) * 0.8),
        ("float32", 20 / 28 * 26 / 16 * 0.8),
    ):
        profile = replace(make_profile(2.0, 20.0, n=8), dtype=dtype)
        memory = MemoryModel(profile, with_weights(profile, measured, 3, 1), pack(profile, N))
        step = RuntimeModel(memory).steps.step((NONE,) * 8, weight_only(1, 7, 3))
        assert step.host.weight_share == pytest.approx(share)


def test_the_best_number_of_weight_only_updates_may_be_less_than_all() -> None:
    _, steps = steps_of(50.0)
    assert steps[3] == min(steps)


# -- the search --------------------------------------------------------------------------------------------------------


def tight_case(seed: int) -> tuple[ModelProfile, HardwareProfile]:
    """Room in host memory for some second weights and hardly a whole copy, and where updates matter."""
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, draw.choice([4, 8, 16])), random.Random(-seed - 1))
    hardware = replace(random_machine(draw), host_adam_gparams=draw.choice([0.5, 1.0, 2.0]), host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, CHUNK))
    beside = memory.least_host_bytes(draw.randint(0, 1), 0)
    return profile, replace(
        hardware, host_bytes=beside + draw.randint(1, 8) * memory.layout.buffer_elements(0)[0] * profile.element_bytes
    )


def short_case(seed: int) -> tuple[ModelProfile, HardwareProfile]:
    """Room in host memory for a few whole copies, and a host that has no time to spare."""
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, 8), random.Random(-seed - 1))
    hardware = replace(random_machine(draw), host_adam_gparams=draw.choice([0.3, 0.5, 1.0]), host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, CHUNK))
    copy = memory.layout.buffer_elements(0)[0] * 12
    return profile, replace(hardware, host_bytes=memory.least_host_bytes(0, 0) + draw.randint(2, 5) * copy)


def memory_of(profile: ModelProfile, hardware: HardwareProfile) -> MemoryModel:
    return MemoryModel(profile, hardware, pack(profile, CHUNK))


@pytest.mark.parametrize("seed", [323, 324])
def test_they_are_made_where_there_is_room_for_whole_copies_too(seed: int) -> None:
    """The update of a weight takes less time, so that more updates are done when backward is over."""
    profile, hardware = tight_case(seed)
    hardware = replace(hardware, host_bytes=10**12)
    found = check_search(profile, hardware)
    assert found.n_weight_only > 0
    assert found.step_ms < 0.99 * fastest_ms(memory_of(profile, hardware), lambda counts: not counts.n_weight_only)


@pytest.mark.parametrize("seed", [230, 245])  # weight-only updates gain more than 1% with all of these
def test_no_plan_is_better_where_host_memory_is_short(seed: int) -> None:
    check_search(*tight_case(seed))


@pytest.mark.parametrize("seed", SCARCE)
def test_they_are_found_where_they_gain_and_come_close_to_the_best(seed: int) -> None:
    profile, hardware = tight_case(seed)
    found = check_search(profile, hardware)
    assert found.n_weight_only > 0
    assert found.step_ms < 0.99 * fastest_ms(memory_of(profile, hardware), lambda counts: not counts.n_weight_only)


@pytest.mark.parametrize("seed", [35, 340])
def test_some_are_weight_only_where_that_beats_every_plan_of_all_or_none(seed: int) -> None:
    profile, hardware = short_case(seed)
    found = check_search(profile, hardware)
    assert 0 < found.n_weight_only < found.n_speculate
    all_or_none = fastest_ms(
        memory_of(profile, hardware), lambda counts: counts.n_weight_only in (0, counts.n_speculate)
    )
    assert found.step_ms < 0.98 * all_or_none
