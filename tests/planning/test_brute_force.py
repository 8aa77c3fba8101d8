"""The search against every plan there is, of small random models on random machines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, Plan, pack, search
from protrain.planning.rates import staging_bytes
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import (
    CLOSE,
    N,
    as_measured,
    check_search,
    fastest_ms,
    large_vocabulary,
    margin,
    measured,
    random_machine,
    random_profile,
    that_streams,
    tight_case,
)
from tests.planning.models import MIB, with_attention

pytestmark = pytest.mark.usefixtures("judged_as_calibrated")
Case = tuple[ModelProfile, HardwareProfile, bool]  # and whether updates run inside backward
SWAP, CKPT_SWAP = BlockMode.SWAP, BlockMode.CKPT_SWAP


def with_more_memory(hardware: HardwareProfile, *, device: int = 1, host: int = 1) -> HardwareProfile:
    return replace(hardware, device_bytes=device * hardware.device_bytes, host_bytes=host * hardware.host_bytes)


def usual(seed: int) -> Case:
    draw = random.Random(seed)
    profile, hardware = measured(draw, seed, share=16), random_machine(draw)
    return profile, hardware, draw.random() < 0.25


def offloading(seed: int, share: int) -> Case:
    """Recomputed blocks have inputs of ``share`` parts of what they save, all of which may be offloaded."""
    draw = random.Random(seed)
    profile, hardware = random_profile(draw, share), random_machine(draw)
    return profile, hardware, draw.random() < 0.25


def accumulating(seed: int) -> Case:
    draw = random.Random(seed)
    profile = replace(measured(draw, seed), accumulation=draw.choice([2, 3, 8]))
    return profile, with_more_memory(random_machine(draw), host=2), draw.random() < 0.25


def with_large_vocabulary(seed: int) -> Case:
    draw = random.Random(seed)
    profile, hardware = large_vocabulary(draw, tied=draw.random() < 0.3), random_machine(draw)
    return profile, with_more_memory(hardware, device=2, host=2), draw.random() < 0.3


def attending(seed: int) -> Case:
    draw = random.Random(seed)
    profile, hardware = as_measured(random_profile(draw, 16), draw), random_machine(draw)
    inside = draw.random() < 0.25
    hardware = replace(
        hardware, device_bytes=max(hardware.device_bytes, 1200 * MIB), host_bytes=hardware.host_bytes + 800 * MIB
    )
    return with_attention(profile, draw.choice([0.1, 0.3, 0.6]), draw.choice([8, 16])), hardware, inside


def of_ranks(seed: int) -> Case:
    """A machine that shares tight memory among its ranks."""
    draw = random.Random(seed)
    world_size = draw.choice([2, 3, 4])
    profile, hardware = measured(draw, seed), random_machine(draw)
    room_bytes = int(draw.uniform(350, 1300)) * MIB
    rates: dict[str, Any] = {name: draw.choice([None, 20.0, 200.0]) for name in ("all_gather_gbps", "all_to_all_gbps")}
    hardware = replace(hardware, world_size=world_size, host_bytes=hardware.host_bytes // 2, **rates)
    return profile, replace(hardware, device_bytes=hardware.collective_bytes + room_bytes), draw.random() < 0.25


# The name of a case says what makes its best plan hard to find.
CASES: dict[str, Callable[[], Case]] = {
    "frozen chunks lie between others": lambda: usual(37),
    "all chunks persistent take less memory than all but one": lambda: usual(3126),
    "the fewest buffers are not best": lambda: offloading(416, 16),
    "the most buffers are not best": lambda: offloading(463, 8),
    "input offload beside swapped blocks": lambda: offloading(4, 4),
    "nothing fits without input offload": lambda: offloading(82, 4),
    "several batches": lambda: accumulating(2),
    "a large embedding": lambda: with_large_vocabulary(15),
    "a large embedding and head": lambda: with_large_vocabulary(41),
    "a large embedding that is tied": lambda: with_large_vocabulary(97),
    "ranks: a chunk gives up being persistent, and its buffer stays": lambda: of_ranks(108),
    "ranks: inputs are offloaded": lambda: of_ranks(151),
    "ranks: whole weights stay of chunks whose states are in host memory": lambda: of_ranks(183),
    "ranks: updates inside backward": lambda: of_ranks(247),
    "ranks: a swapped block, and a speculative update of the weight": lambda: of_ranks(272),
}


@pytest.mark.parametrize("name", CASES)
def test_no_plan_at_all_is_better(name: str) -> None:
    profile, hardware, inside = CASES[name]()
    found = check_search(profile, hardware, inside=inside)
    assert found.world_size == hardware.world_size


# A block that is no longer recomputed takes memory from a persistent chunk, which pays only if that chunk gets a
# speculative update. The block is kept: 60070; swapped: 50016.
@pytest.mark.parametrize("seed", [50016, 60070])
def test_no_plan_is_better_where_chunks_give_up_being_persistent(seed: int) -> None:
    draw = random.Random(seed)
    profile, hardware = measured(draw, seed), random_machine(draw)
    found = search(profile, hardware, chunk_elements=N)
    assert found.n_speculate > found.n_weight_only == found.n_ckpt_swap == 0
    memory = MemoryModel(profile, hardware, pack(profile, N))
    best_ms = fastest_ms(memory, lambda counts: counts.n_weight_only == counts.n_ckpt_swap == 0)
    assert found.step_ms <= CLOSE * best_ms


# The best plan swaps beside input offload: 75, 156; it offloads inputs alone: 91.
@pytest.mark.parametrize("seed", [75, 91, 156])
def test_no_plan_is_better_where_gradients_share_regions(seed: int) -> None:
    draw = random.Random(seed)
    profile = measured(draw, seed)
    hardware = replace(random_machine(draw), device_bytes=int(draw.uniform(450, 1100)) * MIB, host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, N), step_during_backward=True)
    # Room for the states of all chunks or all but one, and hardly for their gradients or what is offloaded.
    least_bytes = memory.least_host_bytes(draw.randint(0, 1), 0)
    swapping = memory.activations((SWAP, *[CKPT_SWAP] * (len(profile.blocks) - 1)))
    offloaded_bytes = draw.choice([0, 0, swapping.swapped_bytes])
    gradients_bytes = draw.randint(0, 4) * memory.layout.buffer_elements(0)[0] * profile.element_bytes
    hardware = replace(hardware, host_bytes=least_bytes + gradients_bytes + offloaded_bytes)
    assert check_search(profile, hardware, inside=True).n_host_gradient > 0


# The step is 7% faster or more, and the plan swaps blocks or offloads inputs: 10558. Help gains less than the memory of
# its staging is worth: 13686. All chunks are persistent: 11835.
@pytest.mark.parametrize(("seed", "share"), [(13686, 16), (10558, 4), (11835, 8)])
def test_help_by_the_gpu_costs_no_more_than_its_staging(seed: int, share: int) -> None:
    draw = random.Random(seed)
    profile, alone = measured(draw, seed, share=share), random_machine(draw)
    inside = draw.random() < 0.25
    found = check_search(profile, that_streams(alone), inside=inside)
    assert found.stream or found.n_persist == found.n_chunks
    without_staging = replace(alone, device_bytes=alone.device_bytes - staging_bytes(found.chunk_elements))
    without = search(profile, without_staging, chunk_elements=N, step_during_backward=inside)

    def score_ms(plan: Plan) -> float:
        return plan.step_ms * margin(plan.counts, plan.n_chunks)

    assert score_ms(found) <= CLOSE * score_ms(without)


@pytest.mark.parametrize(("seed", "gains"), [(37, True), (52, False)])
def test_attention_is_kept_where_that_gains(seed: int, gains: bool) -> None:
    profile, hardware, inside = attending(seed)
    found = check_search(profile, hardware, inside=inside)
    unfused = replace(profile, blocks=tuple(replace(block, attention_bytes=0) for block in profile.blocks))
    without = search(unfused, hardware, chunk_elements=N, step_during_backward=inside)
    assert found.keep_attention is gains
    assert found.step_ms <= (0.99 if gains else CLOSE) * without.step_ms


@pytest.mark.parametrize("seed", [28, 323])
def test_updates_of_the_weight_alone_are_made_where_they_gain(seed: int) -> None:
    profile, hardware = tight_case(seed)
    found = check_search(profile, hardware)
    assert found.n_weight_only > 0
    memory = MemoryModel(profile, hardware, pack(profile, N))
    assert found.step_ms < 0.99 * fastest_ms(memory, lambda counts: not counts.n_weight_only)
