"""The search against every plan there is, of small random models on random machines."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protrain.planning import BlockMode, MemoryModel, pack, search
from protrain.planning.rates import staging_bytes
from tests.planning.brute_force import (
    CLOSE,
    MIB,
    N,
    as_measured,
    check_search,
    fastest_ms,
    margin,
    random_machine,
    random_profile,
    that_streams,
)

pytestmark = pytest.mark.usefixtures("judged_as_calibrated")
# Frozen chunks lie between others: 37, 59. The best plan leaves some updates for after the norm: 1072. Contention
# decides: 44. All chunks persistent take less memory than all but one: 3126.
SEEDS = (37, 59, 3126)
LARGER = (44, 1072)  # models with so many plans that all of them take seconds
# By seed and share. Input offload saves more than 1% beside swapped blocks: 4. Nothing fits without it: 82. The best
# plan has neither the most buffers that it can make room for (463) nor the fewest (416).
OFFLOADING = ((416, 16), (4, 4), (82, 4), (463, 8))
# By seed and share, of machines whose GPU may help. It makes the step 7% faster or more, and the plan swaps blocks or
# offloads inputs: 10558. It gains less than the memory of its staging is worth: 13686. All chunks are persistent:
# 11835.
STREAMING = ((13686, 16), (10558, 4), (11835, 8))
# Updates run inside backward with little host memory. The best plan swaps beside input offload: 75, 156; it offloads
# inputs alone: 91.
SHARING = (75, 91, 156)
# A block that is no longer recomputed takes memory from a persistent chunk, which pays only if that chunk gets a
# speculative update. The block is kept: 60070; swapped: 50016.
SPECULATING = (50016, 60070)
SWAP, CKPT_SWAP = BlockMode.SWAP, BlockMode.CKPT_SWAP


@pytest.mark.parametrize(
    ("seed", "share"),
    [
        *((seed, 16) for seed in SEEDS),
        *(pytest.param(seed, 16, marks=pytest.mark.slow) for seed in LARGER),
        *OFFLOADING,
    ],
)
def test_no_plan_at_all_is_better(seed: int, share: int) -> None:
    draw = random.Random(seed)
    profile, hardware = random_profile(draw, share), random_machine(draw)
    if (seed, share) not in OFFLOADING:
        profile = as_measured(profile, random.Random(-seed - 1))
    check_search(profile, hardware, inside=draw.random() < 0.25)


def test_two_integers_change_together_where_neither_does_alone() -> None:
    """Without such changes the search ends at a plan that is 2.7% slower."""
    draw = random.Random(31)
    check_search(random_profile(draw, 2), random_machine(draw))


@pytest.mark.parametrize("seed", SPECULATING)
def test_no_plan_is_better_where_chunks_give_up_being_persistent(seed: int) -> None:
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, draw.choice([4, 8, 16])), random.Random(-seed - 1))
    hardware = random_machine(draw)
    found = search(profile, hardware, chunk_elements=N)
    assert found.n_speculate > found.n_weight_only == found.n_ckpt_swap == 0
    memory = MemoryModel(profile, hardware, pack(profile, N))
    best_ms = fastest_ms(memory, lambda counts: counts.n_weight_only == counts.n_ckpt_swap == 0)
    assert found.step_ms <= CLOSE * best_ms


@pytest.mark.parametrize("seed", SHARING)
def test_no_plan_is_better_where_gradients_share_regions(seed: int) -> None:
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, draw.choice([4, 8, 16])), random.Random(-seed - 1))
    hardware = replace(random_machine(draw), device_bytes=int(draw.uniform(450, 1100)) * MIB, host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, N), update_in_backward=True)
    # Room for the states of all chunks or all but one, and hardly for their gradients or what is offloaded.
    least_bytes = memory.least_host_bytes(draw.randint(0, 1), 0)
    offloaded_bytes = draw.choice([0, 0, memory.swapped_bytes((SWAP, *[CKPT_SWAP] * (len(profile.blocks) - 1)))])
    hardware = replace(
        hardware,
        host_bytes=least_bytes
        + draw.randint(0, 4) * memory.layout.buffer_elements(0)[0] * profile.element_bytes
        + offloaded_bytes,
    )
    assert check_search(profile, hardware, inside=True).n_host_gradient > 0


@pytest.mark.parametrize("seed", [2, 3])
def test_no_plan_is_better_where_a_step_has_several_batches(seed: int) -> None:
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, draw.choice([4, 8, 16])), random.Random(-seed - 1))
    profile = replace(profile, accumulation=draw.choice([2, 3, 8]))
    hardware, inside = random_machine(draw), draw.random() < 0.25
    check_search(profile, replace(hardware, host_bytes=2 * hardware.host_bytes), inside=inside)


@pytest.mark.parametrize(("seed", "share"), STREAMING)
def test_where_the_gpu_may_help_no_plan_is_better_and_help_costs_no_more_than_its_staging(
    seed: int, share: int
) -> None:
    draw = random.Random(seed)
    profile, machine = random_profile(draw, share), random_machine(draw)
    profile = as_measured(profile, random.Random(-seed - 1))
    hardware, inside = that_streams(machine), draw.random() < 0.25
    found = check_search(profile, hardware, inside=inside)
    assert found.stream or found.n_persist == found.n_chunks
    without_staging = replace(machine, device_bytes=machine.device_bytes - staging_bytes(found.chunk_elements))
    alone = search(profile, without_staging, chunk_elements=N, step_during_backward=inside)
    assert found.step_ms * margin(found.counts, found.n_chunks) <= CLOSE * alone.step_ms * margin(
        alone.counts, alone.n_chunks
    )
