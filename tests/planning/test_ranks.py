"""Several ranks: what they gather, reduce and upload, when, and the plans that are found for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import Contention, HardwareProfile
from protrain.planning import (
    Answer,
    BlockMode,
    Comparison,
    MemoryModel,
    Plan,
    RuntimeModel,
    check,
    evaluate,
    explain,
    pack,
    search,
)
from protrain.planning.answer import Job
from protrain.planning.step import COLLECTIVE_MS
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, REDUCE, UP, Operation, Timeline
from protrain.profiler.model_profile import ModelProfile
from tests.planning.machines import H100
from tests.planning.models import (
    MACHINE,
    MIB,
    MOVE_MS,
    UPDATE_MS,
    N,
    busy_ms,
    chain,
    machine,
    make_profile,
    model_of,
    placed,
)

NONE = BlockMode.NONE
MODES = (NONE,) * 4
# Two ranks receive and send half of a tensor in half the time of the whole: a chunk of 2.56 MB takes 1 ms.
TWO = replace(MACHINE, world_size=2, all_gather_gbps=1.28, all_to_all_gbps=1.28)
WHOLE = 1.0 + COLLECTIVE_MS  # ms: one chunk gathered or reduced
SLIGHT = 0.005  # ms: the device's update of half a chunk


def step_ms(profile: ModelProfile, n_persist: int, n_buffer: int, hardware: HardwareProfile = TWO) -> float:
    return model_of(profile, hardware).step_ms(MODES, placed(n_persist, n_buffer))


def of_lane(timeline: Timeline, lane: int) -> list[Operation]:
    return [operation for operation in timeline.operations if operation.lane == lane]


def test_what_slow_blocks_do_not_hide_is_the_last_reduction_and_the_first_gather() -> None:
    profile = chain(3.0, 6.0)
    expected = 4 * 9.0 + WHOLE + SLIGHT + WHOLE
    assert step_ms(profile, 4, 4) == pytest.approx(expected, rel=1e-4)
    assert step_ms(profile, 4, 2) == pytest.approx(expected, rel=1e-4), "gathers of backward are hidden"
    faster = replace(TWO, all_gather_gbps=12.8, all_to_all_gbps=6.4)  # 0.1 and 0.2 ms
    expected = 4 * 9.0 + 0.1 + 0.2 + 2 * COLLECTIVE_MS + SLIGHT
    assert step_ms(profile, 4, 4, faster) == pytest.approx(expected, rel=1e-4)


def test_computing_is_slower_beside_collectives() -> None:
    """While one runs, which it does twice as long as alone, computing goes on at three quarters of its rate."""
    slowed = replace(TWO, contention=(Contention(activities=("matmul", "collective"), shares=(0.75, 0.5)),))
    for n_buffer, n_gathers in ((4, 4), (2, 6)):
        expected = step_ms(chain(3.0, 6.0), 4, n_buffer) + 2 * 0.25 * (n_gathers + 4) * WHOLE
        assert step_ms(chain(3.0, 6.0), 4, n_buffer, slowed) == pytest.approx(expected, rel=1e-3)


def test_a_chunk_in_host_memory_goes_down_and_up_in_shards() -> None:
    """The last gradient is reduced, offloaded and updated, and its weight is uploaded and gathered: half of each."""
    expected = WHOLE + (MOVE_MS + UPDATE_MS + MOVE_MS) / 2 + WHOLE + 4 * 9.0
    assert step_ms(chain(3.0, 6.0), 0, 4) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_links_carry_a_share_and_each_chunk_is_gathered_once_if_all_stay(world_size: int) -> None:
    profile, counts = chain(3.0, 6.0), placed(1, 3)
    alone = RuntimeModel(MemoryModel(profile, MACHINE, pack(profile, N))).timeline(MODES, counts)
    ranks = replace(TWO, world_size=world_size)
    timeline = model_of(profile, ranks).timeline(MODES, placed(1, 4))
    for lane in (UP, DOWN, HOST):
        assert busy_ms(timeline, lane) == pytest.approx(busy_ms(alone, lane) / world_size)
        assert busy_ms(timeline, lane) > 0
    assert sorted(one.name for one in of_lane(timeline, GATHER)) == [f"gather {chunk}" for chunk in range(4)]
    assert [one.name for one in of_lane(timeline, REDUCE)] == [f"reduce {chunk}" for chunk in (3, 2, 1, 0)]
    assert {GATHER, REDUCE} <= set(timeline.lanes)
    assert not {GATHER, REDUCE} & set(alone.lanes)
    twice = Counter(one.name for one in of_lane(model_of(profile, ranks).timeline(MODES, placed(1, 2)), GATHER))
    assert twice == {"gather 0": 2, "gather 1": 2, "gather 2": 1, "gather 3": 1}


def test_a_gradient_waits_for_staging_to_be_sent_and_to_be_offloaded_from() -> None:
    """There are two staging buffers of either kind, so the third gradient waits for what the first one does."""
    profile, counts = chain(0.1, 0.2), placed(0, 4)
    slow = replace(TWO, all_to_all_gbps=0.128)  # 10 ms a chunk, where an offload takes 1.28
    reductions = of_lane(timeline := model_of(profile, slow).timeline(MODES, counts), REDUCE)
    flattened = {one.name: one.start_ms for one in of_lane(timeline, GPU)}
    assert flattened["flatten 2"] < reductions[0].end_ms
    assert flattened["flatten 1"] == pytest.approx(reductions[0].end_ms)
    assert flattened["flatten 0"] == pytest.approx(reductions[1].end_ms)
    slow = replace(TWO, d2h_gbps=0.128, bidirectional_gbps=1.128)  # 10 ms a shard, where a reduction takes 1.04
    offloads = of_lane(timeline := model_of(profile, slow).timeline(MODES, counts), DOWN)
    ends = {one.name: one.end_ms for one in offloads if one.start_ms > timeline.forward_end_ms}
    reduced = {one.name: one.start_ms for one in of_lane(timeline, REDUCE)}
    assert reduced["reduce 2"] < ends["gradients 3"]
    assert reduced["reduce 1"] == pytest.approx(ends["gradients 3"])


def test_a_comparison_begins_with_the_fastest_or_the_cheapest() -> None:
    profile = chain(3.0, 6.0)
    slow = replace(TWO, matmul_tflops=TWO.matmul_tflops / 4, all_gather_gbps=0.0128, all_to_all_gbps=0.0128)
    answers = {name: explain(search(profile, each), profile, each) for name, each in (("slow", slow), ("fast", TWO))}
    lacking = replace(TWO, device_bytes=100 * MIB)
    with pytest.raises(PlanError) as caught:
        search(profile, lacking)
    answers = {"none": Answer.refused(caught.value, profile, lacking), **answers}
    assert list(Comparison.of(answers).machines) == ["fast", "slow", "none"]
    priced = {name: replace(each, job=Job(price={"slow": 0.001}.get(name, 9.0))) for name, each in answers.items()}
    found = Comparison.of(priced)
    assert list(found.machines) == ["slow", "fast", "none"]
    rows = [row.split()[:2] for row in found.table().splitlines()[1:]]
    assert rows == [["slow", "yes"], ["fast", "yes"], ["none", "no"]]


def test_what_does_not_fit_says_what_each_gpu_needs() -> None:
    profile = make_profile()
    small = machine("2.7GiB", "100MiB", world_size=2)
    with pytest.raises(
        PlanError, match=r"one of 2 ranks, with its share\. To fit: .* for each GPU of the machine"
    ) as no:
        search(profile, small)
    assert no.value.available_bytes == small.host_bytes
    roomy = machine("3.2GiB", "8GiB", world_size=2)
    plan = search(profile, roomy)
    assert plan.device_bytes <= roomy.device_bytes
    text = explain(plan, profile, roomy).table()
    assert "host memory a GPU" in text
    assert "device memory a GPU" in text


def test_a_wait_for_a_collective_is_named() -> None:
    slow = replace(TWO, all_gather_gbps=0.128)  # 10 ms a chunk
    profile = chain(3.0, 6.0)
    plan = evaluate(profile, slow, n_persist=4, n_buffer=4, n_swap=0, n_ckpt=0, chunk_elements=N)
    forward, *_ = explain(plan, profile, slow).phases
    assert forward.limit == "gathers"
    assert forward.waits_ms["gathers"] > 0.5 * forward.length_ms
    alone = evaluate(profile, MACHINE, n_persist=4, n_buffer=0, n_swap=0, n_ckpt=0, chunk_elements=N)
    forward, *_ = explain(alone, profile, MACHINE).phases
    assert not {"gathers", "reductions"} & set(forward.waits_ms)


def test_a_plan_for_another_number_of_ranks_is_refused_with_the_remedy() -> None:
    profile, two = make_profile(4), replace(H100, world_size=2)
    plan = search(profile, two)
    assert (plan.world_size, Plan.from_json(plan.to_json())) == (2, plan)
    assert "world_size=2" in str(plan)
    assert check(plan, profile, two) == plan
    assert plan.tokens_per_s == pytest.approx(2 * profile.tokens / plan.step_ms * 1e3)
    for other in (1, 3):
        with pytest.raises(ValueError, match=f"made for world_size=2, and here it is {other}.*start 2 processes"):
            check(plan, profile, replace(H100, world_size=other))
    with pytest.raises(ValueError, match=r"world_size=1, and here it is 2.*start 1 process, make a new plan"):
        check(search(profile, H100), profile, two)
    with pytest.raises(ValueError, match=r"Plan\.world_size must be at least 1, not 0"):
        replace(plan, world_size=0)
