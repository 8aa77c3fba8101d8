"""Several ranks: what they gather, reduce and upload, when, and the plans that are found for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from protrain.common.errors import PlanError
from protrain.planning import Answer, BlockMode, Comparison, MemoryModel, Models, check, explain, pack, search
from protrain.planning.answer import Job
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, REDUCE, UP, Operation, Timeline
from tests.planning.models import H100, MACHINE, MIB, TWO, N, busy_ms, chain, machine, make_profile, model_of, placed

NONE = BlockMode.NONE
MODES = (NONE,) * 4


def of_lane(timeline: Timeline, lane: int) -> list[Operation]:
    return [operation for operation in timeline.operations if operation.lane == lane]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_links_carry_a_share_and_each_chunk_is_gathered_once_if_all_stay(world_size: int) -> None:
    profile, counts = chain(3.0, 6.0), placed(1, 3)
    alone = Models(MemoryModel(profile, MACHINE, pack(profile, N))).timeline(MODES, counts)
    ranks = replace(TWO, world_size=world_size)
    timeline = model_of(profile, ranks).timeline(MODES, placed(1, 4))
    for lane in (UP, DOWN, HOST):
        assert busy_ms(timeline, lane) == pytest.approx(busy_ms(alone, lane) / world_size)
        assert busy_ms(timeline, lane) > 0
    assert sorted(one.name for one in of_lane(timeline, GATHER)) == [f"gather {chunk}" for chunk in range(4)]
    assert [one.name for one in of_lane(timeline, REDUCE)] == [f"reduce {chunk}" for chunk in (3, 2, 1, 0)]
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
    text = str(explain(plan, profile, roomy))
    assert "host memory a GPU" in text
    assert "device memory a GPU" in text


def test_a_plan_for_another_number_of_ranks_is_refused_with_the_remedy() -> None:
    profile, two = make_profile(4), replace(H100, world_size=2)
    plan = search(profile, two)
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
