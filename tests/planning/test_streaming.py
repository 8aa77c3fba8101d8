"""Updates by the GPU of what lies in host memory: which chunks, how long they take, what they leave to others."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from protrain.hardware.profile import Contention, HardwareProfile
from protrain.planning import BlockMode, Plan, RuntimeModel, check, evaluate, pack
from protrain.planning.contention import OTHERS, rates
from protrain.planning.layout import updated_chunks
from protrain.planning.rates import staging_bytes
from protrain.planning.sharing import Waiting, next_for_gpu
from protrain.planning.simulate import Run
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, UP, Timeline
from tests.planning.counts import placed
from tests.planning.machines import H100
from tests.planning.test_runtime import MACHINE, MOVE, N, make_profile, model_of

NONE = BlockMode.NONE
SLOW = replace(MACHINE, host_adam_gparams=0.0128, streamed_adam_gparams=0.00639)  # 100 ms a chunk, and just over 200
MODES = (NONE,) * 7
COMPUTE = 3.0  # ms: forward of a block


def slow_model(**options: Any) -> RuntimeModel:
    return model_of(make_profile(COMPUTE, 6.0, n=7), SLOW, **options)


# -- the choice --------------------------------------------------------------------------------------------------------


def waiting(*updates: tuple[float, float, float], upload_ms: float = 0.0, states_ms: float = 0.0) -> list[Waiting]:
    """Updates by how long the host and the GPU take for them, and when the forward needs them, on a fast link."""
    return [Waiting(*update, upload_ms, states_ms) for update in updates]


def test_a_host_in_time_gets_no_help() -> None:
    assert next_for_gpu([], 0.0, 0.0, 1.0) is None
    assert next_for_gpu(waiting((10, 1, 10), (10, 1, 20), (10, 1, 30)), 0.0, 0.0, 1.0) is None


def test_the_gpu_takes_the_first_late_update_that_it_finishes_sooner() -> None:
    # The host ends at 10, 20, 30, 40. The GPU would be no sooner with the second, and has the third done after 25.
    updates = waiting((10, 25, 10), (10, 20, 20), (10, 25, 25), (10, 25, 25))
    assert next_for_gpu(updates, 0.0, 0.0, 1.0) == 2
    assert next_for_gpu(updates[:2], 0.0, 0.0, 1.0) is None
    assert next_for_gpu(waiting((10, 25, 10), (10, 17, 15)), 0.0, 0.0, 1.0) == 1
    assert next_for_gpu(waiting((10, 7, 5)), 0.0, 0.0, 1.0) == 0


def test_the_gpu_takes_nothing_that_spares_forward_less_than_a_fifth_of_the_hosts_time() -> None:
    assert next_for_gpu(waiting((10, 8.5, 5)), 0.0, 0.0, 1.0) is None
    assert next_for_gpu(waiting((10, 7.5, 5)), 0.0, 0.0, 1.0) == 0
    # Forward waits for the first update until 10 in any case, 5 more than it would, and for the second 5 more, too.
    assert next_for_gpu(waiting((10, inf, 5), (10, 5, 15)), 0.0, 0.0, 1.0) is None
    assert next_for_gpu(waiting((10, inf, 5), (10, 5, 12)), 0.0, 0.0, 1.0) == 1


def test_a_host_that_the_gpu_slows_down_makes_others_later() -> None:
    # The last update is late by 10. On the GPU it is late by 5, and the host does the others meanwhile: at 90% of its
    # rate they are late by 3.3, and at 75% by 8.75.
    updates = waiting((10, inf, 10), (10, inf, 20), (10, inf, 30), (10, 35, 30))
    assert next_for_gpu(updates, 0.0, 0.0, 0.9) == 3
    assert next_for_gpu(updates, 0.0, 0.0, 0.75) is None


def test_states_on_a_slow_link_keep_weights_from_it() -> None:
    # The host ends at 10, 20, 30, 40, and forward needs another chunk every 5: it waits for the last until 40, 20 more
    # than it would. If the GPU does that one by 32, the host is done at 30, and forward waits for 15.
    updates = (10, inf, 5), (10, inf, 10), (10, inf, 15), (10, 32, 20)
    assert next_for_gpu(waiting(*updates, upload_ms=2, states_ms=14), 0.0, 0.0, 1.0) == 3
    # Uploads of 7 follow the states from 26 on, and the last begins at 47.
    assert next_for_gpu(waiting(*updates, upload_ms=7, states_ms=26), 0.0, 0.0, 1.0) is None
    # If no states were in their way, it would begin at 37, as the third one begins when it is updated.
    assert next_for_gpu(waiting(*updates, upload_ms=7), 0.0, 0.0, 1.0) == 3


def test_a_link_that_is_late_by_itself_gets_no_more_to_carry() -> None:
    # Uploads of 20 go one after the other from 10 on, so the last begins at 70, whoever makes its update by 40.
    updates = [(10, 15, 0)] * 4
    assert next_for_gpu(waiting(*updates, upload_ms=20, states_ms=1), 0.0, 0.0, 1.0) is None
    assert next_for_gpu(waiting(*updates), 0.0, 0.0, 1.0) == 1


def test_updates_that_the_gpu_cannot_do_are_passed_over_and_take_the_host_their_time() -> None:
    assert next_for_gpu(waiting((10, inf, 5), (10, inf, 5), (10, 20, 5)), 0.0, 0.0, 1.0) == 2
    assert next_for_gpu(waiting((10, inf, 0), (10, inf, 0)), 0.0, 0.0, 1.0) is None


def test_lateness_counts_from_when_the_host_is_free_and_not_from_the_past() -> None:
    updates = waiting((10, 5, 20), (10, 5, 30))
    assert next_for_gpu(updates, 0.0, 10.0, 1.0) is None
    assert next_for_gpu(updates, 0.0, 13.0, 1.0) == 0
    assert next_for_gpu(updates, 10.0, 0.0, 1.0) is None
    assert next_for_gpu(updates, 13.0, 0.0, 1.0) == 0
    # The GPU begins now and not when the host is free.
    assert next_for_gpu(waiting((10, 30, 20)), 0.0, 23.0, 1.0) == 0
    assert next_for_gpu(waiting((10, 30, 20)), 3.0, 23.0, 1.0) is None


# -- the runtime model -------------------------------------------------------------------------------------------------


def test_chunks_that_no_unit_uses_and_frozen_ones_are_not_updated() -> None:
    profile = make_profile(1.0, 1.0)
    frozen = tuple(replace(record, group=-1 if at == 1 else 0) for at, record in enumerate(profile.parameters))
    found = updated_chunks(replace(profile, parameters=frozen, calls=(0, 1, 3)), pack(profile, N))
    assert found == [0, 1, 3], "the layout says what is trainable"
    partly = replace(profile, parameters=frozen, calls=(0, 1, 3))
    layout = pack(partly, N)
    assert [layout.chunks[chunk].trainable for chunk in updated_chunks(partly, layout)] == [True, True]


def names(timeline: Timeline, lane: int) -> list[str]:
    """What ``lane`` does between the begin of the step and the end of its forward, in order."""
    return [op.name for op in timeline.operations if op.lane == lane and op.start_ms < timeline.forward_end_ms]


def test_host_and_gpu_share_the_updates_between_norm_and_forward() -> None:
    # Chunk 0 is persistent. The host takes 1, and the GPU the first that it finishes sooner, which is 3: after 200 ms.
    # Meanwhile the host makes 2 and takes 4. Then the GPU takes 6, and the host makes 5. Both are done after 400 ms.
    shared = slow_model().step_ms(MODES, placed(1, 6))
    assert shared == pytest.approx(4 * 100.0 + MOVE + COMPUTE + 7 * 6.0, rel=0.02)
    alone = slow_model(stream=False).step_ms(MODES, placed(1, 6))
    assert alone == pytest.approx(6 * 100.0 + MOVE + COMPUTE + 7 * 6.0, rel=0.02)


def test_the_timeline_names_streamed_updates() -> None:
    timeline = slow_model().timeline(MODES, placed(1, 6))
    assert timeline.lanes[STREAM] == "streamed updates"
    assert names(timeline, STREAM) == ["update 3", "update 6"]
    assert names(timeline, HOST) == ["update 1", "update 2", "update 4", "update 5"]
    assert len(slow_model(stream=False).timeline(MODES, placed(1, 6)).lanes) == STREAM
    for lane in (HOST, STREAM):
        operations = [operation for operation in timeline.operations if operation.lane == lane]
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in pairwise(operations))


def test_a_host_that_forward_does_not_wait_for_is_left_alone() -> None:
    # Forward needs another chunk every 3 ms, and an upload takes 2.56 of them. Only the first update comes too late, by
    # its own time: the GPU would not be sooner.
    profile, counts = make_profile(COMPUTE, 6.0, n=7), placed(1, 6)
    in_time = replace(MACHINE, host_adam_gparams=0.64, streamed_adam_gparams=0.064)  # 2 and 20 ms a chunk
    assert not names(model_of(profile, in_time).timeline(MODES, counts), STREAM)
    late = replace(in_time, host_adam_gparams=0.128)  # 10 ms a chunk, so that the last of six is late by 45 ms
    assert names(model_of(profile, late).timeline(MODES, counts), STREAM)
    known = model_of(profile, replace(in_time, streamed_adam_gparams=None), stream=False)
    assert model_of(profile, in_time).step_ms(MODES, counts) == known.step_ms(MODES, counts)


def test_a_gpu_that_would_be_no_sooner_does_not_help() -> None:
    hardware = replace(SLOW, streamed_adam_gparams=0.002)  # 640 ms a chunk, where the host needs 600 for all
    assert not names(model_of(make_profile(COMPUTE, 6.0, n=7), hardware).timeline(MODES, placed(1, 6)), STREAM)


def test_the_gpu_may_help_unless_the_plan_says_otherwise_or_its_rate_is_unknown() -> None:
    profile = make_profile(COMPUTE, 6.0, n=7)
    counts: dict[str, Any] = {"n_persist": 1, "n_buffer": 6, "n_swap": 0, "n_ckpt": 0, "chunk_elements": N}
    plan, without = (evaluate(profile, SLOW, **counts, stream=stream) for stream in (None, False))
    assert (plan.stream, without.stream) == (True, False)
    assert plan.step_ms < without.step_ms
    assert plan.device_bytes == without.device_bytes + staging_bytes(N)
    for found in (plan, without):
        assert check(found, profile, SLOW) == found
        assert Plan.from_json(found.to_json()) == found
    assert not evaluate(profile, replace(SLOW, streamed_adam_gparams=None), **counts).stream
    assert not evaluate(replace(profile, device="cpu"), replace(SLOW, device_type="cpu"), **counts).stream
    resident: dict[str, Any] = {**counts, "n_persist": 7, "n_buffer": 0}
    nothing_away, alone = (evaluate(profile, SLOW, **resident, stream=stream) for stream in (None, False))
    assert nothing_away.device_bytes == alone.device_bytes, "there is nothing to update in host memory"


def test_a_plan_counts_on_no_help_with_speculative_updates() -> None:
    timeline = slow_model().timeline(MODES, placed(1, 6, 2))
    streamed = {operation.name for operation in timeline.operations if operation.lane == STREAM}
    assert streamed
    assert streamed <= {f"update {chunk}" for chunk in range(3, 7)}
    assert not names(slow_model().timeline(MODES, placed(1, 6, 6)), STREAM), "every update is speculative"


def test_inside_backward_updates_that_the_host_begins_there_are_its_own_and_the_rest_is_shared() -> None:
    # A backward of 42 ms is over while the host makes the first update, of the chunk whose gradient arrives first.
    timeline = slow_model(update_in_backward=True).timeline(MODES, placed(1, 6))
    # Only the begun update is the host's without a choice. Then it makes 1, 3 and 4 while the GPU makes 2 and 5.
    assert names(timeline, HOST) == ["speculative update 6", "update 1", "update 3", "update 4"]
    assert names(timeline, STREAM) == ["update 2", "update 5"]
    in_backward = [op for op in timeline.operations if op.name.startswith("speculative update") and op.start_ms > 0]
    assert [(op.name, op.lane) for op in in_backward] == [("speculative update 6", HOST)]
    assert timeline.forward_end_ms < in_backward[0].start_ms < timeline.backward_end_ms < in_backward[0].end_ms
    alone = slow_model(update_in_backward=True, stream=False).step_ms(MODES, placed(1, 6))
    assert timeline.step_ms < 0.75 * alone


def test_help_makes_no_step_longer_when_nothing_contends() -> None:
    draw, helped, n_steps = random.Random(0), 0, 150
    for _ in range(n_steps):
        n = draw.choice([3, 5, 9])
        profile = make_profile(draw.uniform(0.1, 5), draw.uniform(0.1, 9), n=n)
        hardware = replace(
            MACHINE,
            bidirectional_gbps=1e6,
            host_adam_gparams=1.28 / draw.uniform(0.2, 30),
            streamed_adam_gparams=1.28 / draw.uniform(0.2, 60),
        )
        options = {"update_in_backward": draw.random() < 0.3}
        n_persist = draw.randint(0, n - 1)
        n_speculate = 0 if options["update_in_backward"] else draw.choice([0, draw.randint(0, n - n_persist)])
        counts = placed(n_persist, draw.randint(1, n - n_persist), n_speculate, draw.randint(0, n_speculate))
        with_help, alone = (
            Run(model_of(profile, hardware, stream=stream, **options).steps.step((NONE,) * n, counts)).step_ms
            for stream in (True, False)
        )
        assert with_help <= 1.02 * alone
        helped += with_help < 0.98 * alone
    assert helped > n_steps // 10


@pytest.mark.parametrize(("kept", "helped"), [(1.0, ["update 3", "update 6"]), (0.6, []), (0.4, [])])
def test_a_link_that_the_host_slows_down_carries_no_states(kept: float, helped: list[str]) -> None:
    """The link takes 32 ms for a weight and 224 for states. Help would cost 6% and 17% where it keeps 0.6 and 0.4."""
    contention = (Contention(activities=("h2d", "host_adam"), shares=(kept, 1.0)),)
    hardware = replace(SLOW, h2d_gbps=0.08, d2h_gbps=0.08, bidirectional_gbps=0.16, contention=contention)
    with_help, alone = (model_of(make_profile(COMPUTE, 6.0, n=7), hardware, stream=stream) for stream in (True, False))
    timeline = with_help.timeline(MODES, placed(1, 6))
    assert names(timeline, STREAM) == helped
    assert timeline.step_ms <= alone.step_ms(MODES, placed(1, 6)) * (0.9 if helped else 1.0)


def test_on_a_cpu_whoever_updates_takes_as_long() -> None:
    profile = replace(make_profile(3.0, 6.0), device="cpu")
    hardware = replace(SLOW, device_type="cpu")
    with_help, alone = (model_of(profile, hardware, stream=stream) for stream in (True, False))
    assert with_help.step_ms((NONE,) * 4, placed(1, 3)) == alone.step_ms((NONE,) * 4, placed(1, 3))


@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", 26), ("float16", 30), ("float32", 28)])
def test_wider_states_take_as_much_longer_as_they_have_bytes(dtype: str, sizes: int) -> None:
    """Calibration has bfloat16, with the gradient in host memory as here: 26 bytes a parameter in both directions."""
    model = model_of(replace(make_profile(COMPUTE, 6.0, n=7), dtype=dtype), SLOW)
    timeline = model.timeline(MODES, placed(1, 6))
    lengths = [operation.end_ms - operation.start_ms for operation in timeline.operations if operation.lane == STREAM]
    assert min(lengths) == pytest.approx(200.0 * sizes / 26, rel=0.01)


# -- what they leave to others -----------------------------------------------------------------------------------------


def left(hardware: HardwareProfile, lane: int, *beside: int) -> float:
    found = rates(hardware, 130.0, (42.0, 36.0))
    return float(found[*(int(other in beside) for other in OTHERS[lane]), lane])


def test_the_link_is_shared_by_what_is_wanted() -> None:
    machine = replace(H100, h2d_gbps=50.0, d2h_gbps=50.0, bidirectional_gbps=80.0, host_dram_gbps=300.0, contention=())
    assert left(machine, STREAM) == left(machine, STREAM, GPU) == left(machine, STREAM, HOST) == 1.0
    # 40 GB/s a direction, of which uploads want 50 and states 42.
    assert left(machine, STREAM, UP) == left(machine, UP, STREAM) == pytest.approx(40 / 92)
    assert left(machine, DOWN, STREAM) == pytest.approx(40 / 86)
    assert left(machine, STREAM, UP, DOWN) == pytest.approx(40 / 92)
    assert left(machine, UP, STREAM, HOST, GPU, DOWN) <= left(machine, UP, STREAM)
    assert left(replace(machine, host_dram_gbps=104.0), STREAM, HOST) == pytest.approx(0.5)
    assert left(replace(machine, host_dram_gbps=200.0), HOST, STREAM) == left(
        replace(machine, host_dram_gbps=200.0), HOST, UP, DOWN
    )


def test_what_was_measured_beside_streamed_updates_counts() -> None:
    group = Contention(activities=("streamed_adam", "host_adam", "matmul"), shares=(0.7, 0.9, 0.95))
    machine = replace(
        H100, h2d_gbps=50.0, d2h_gbps=50.0, bidirectional_gbps=80.0, host_dram_gbps=300.0, contention=(group,)
    )
    assert left(machine, STREAM, HOST, GPU) == 0.7
    assert left(machine, HOST, STREAM, GPU) == 0.9
    assert left(machine, GPU, STREAM, HOST) == 0.95
    assert left(machine, STREAM, HOST) == left(machine, HOST, STREAM) == 1.0, "nothing was measured for these two alone"
    assert left(machine, STREAM, HOST, GPU, UP) == pytest.approx(40 / 92)
    assert left(machine, HOST, UP, STREAM, GPU) == 0.9


def test_beside_copies_the_link_has_what_calibration_found_for_both_ways() -> None:
    """Uploads of a 13 B LLaMA shape took 38 to 45 ms on an H100 beside streamed and host updates: 11.5 ms alone."""
    both_ways = Contention(activities=("h2d", "d2h", "host_adam"), shares=(0.6, 0.86, 0.8))
    streamed = Contention(activities=("streamed_adam", "host_adam"), shares=(0.87, 0.9))
    machine = replace(H100, h2d_gbps=54.0, d2h_gbps=54.0, bidirectional_gbps=94.0, contention=(both_ways, streamed))
    assert left(machine, UP, STREAM, HOST) == pytest.approx(0.6 * 54 / (54 + 42)), "11.5 ms become 34"
    assert left(machine, STREAM, UP, HOST) == pytest.approx(0.6 * 54 / (54 + 42))
    assert left(machine, STREAM, HOST) == 0.87
    assert left(machine, HOST, STREAM) == 0.9
    assert left(machine, HOST, STREAM, UP) == 0.8


def test_streamed_states_need_room_on_the_device() -> None:
    assert staging_bytes(N) == 2 * 18 * N, "no more than for two whole chunks"
    assert staging_bytes(100 * N) == 128 * 1024**2
