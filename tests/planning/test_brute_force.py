"""The search against every plan there is, of small random models on random machines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, pack
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import (
    N,
    as_measured,
    check_search,
    large_vocabulary,
    measured,
    random_machine,
    random_profile,
    that_streams,
    tight_case,
)
from tests.planning.models import MIB, judge_as_calibrated, with_attention


@pytest.fixture(autouse=True)
def judged_as_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for the host as it was calibrated, so that the search judges them by the predicted time."""
    judge_as_calibrated(monkeypatch)


Case = tuple[ModelProfile, HardwareProfile]
SWAP, CKPT_SWAP = BlockMode.SWAP, BlockMode.CKPT_SWAP


def with_more_memory(hardware: HardwareProfile, *, device: int = 1, host: int = 1) -> HardwareProfile:
    return replace(hardware, device_bytes=device * hardware.device_bytes, host_bytes=host * hardware.host_bytes)


def updated_inside(profile: ModelProfile, draw: random.Random, *, share: float = 0.25) -> ModelProfile:
    """``profile`` with updates inside backward in a ``share`` of the cases."""
    return replace(profile, step_during_backward=draw.random() < share)


def usual(seed: int) -> Case:
    draw = random.Random(seed)
    profile, hardware = measured(draw, seed, share=16), random_machine(draw)
    return updated_inside(profile, draw), hardware


def offloading(seed: int, share: int) -> Case:
    """Recomputed blocks have inputs of ``share`` parts of what they save, all of which may be offloaded."""
    draw = random.Random(seed)
    profile, hardware = random_profile(draw, share), random_machine(draw)
    return updated_inside(profile, draw), hardware


def accumulating(seed: int) -> Case:
    draw = random.Random(seed)
    profile = replace(measured(draw, seed), accumulation=draw.choice([2, 3, 8]))
    hardware = with_more_memory(random_machine(draw), host=2)
    return updated_inside(profile, draw), hardware


def with_large_vocabulary(seed: int) -> Case:
    draw = random.Random(seed)
    profile, hardware = large_vocabulary(draw, tied=draw.random() < 0.3), random_machine(draw)
    return updated_inside(profile, draw, share=0.3), with_more_memory(hardware, device=2, host=2)


def attending(seed: int) -> Case:
    draw = random.Random(seed)
    profile, hardware = as_measured(random_profile(draw, 16), draw), random_machine(draw)
    profile = updated_inside(profile, draw)
    hardware = replace(
        hardware, device_bytes=max(hardware.device_bytes, 1200 * MIB), host_bytes=hardware.host_bytes + 800 * MIB
    )
    return with_attention(profile, draw.choice([0.1, 0.3, 0.6]), draw.choice([8, 16])), hardware


def of_ranks(seed: int) -> Case:
    """A machine that shares tight memory among its ranks."""
    draw = random.Random(seed)
    world_size = draw.choice([2, 3, 4])
    profile, hardware = measured(draw, seed), random_machine(draw)
    room_bytes = int(draw.uniform(350, 1300)) * MIB
    rates: dict[str, Any] = {name: draw.choice([None, 20.0, 200.0]) for name in ("all_gather_gbps", "all_to_all_gbps")}
    hardware = replace(hardware, world_size=world_size, host_bytes=hardware.host_bytes // 2, **rates)
    hardware = replace(hardware, device_bytes=hardware.collective_bytes + room_bytes)
    return updated_inside(profile, draw), hardware


def sharing_regions(seed: int) -> Case:
    """Updates inside backward, and room for the states of all chunks or all but one and hardly for their gradients."""
    draw = random.Random(seed)
    profile = replace(measured(draw, seed), step_during_backward=True)
    hardware = replace(random_machine(draw), device_bytes=int(draw.uniform(450, 1100)) * MIB, host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, N))
    least_bytes = memory.least_host_bytes(draw.randint(0, 1), 0)
    swapping = memory.activations((SWAP, *[CKPT_SWAP] * (len(profile.blocks) - 1)))
    offloaded_bytes = draw.choice([0, 0, swapping.swapped_bytes])
    gradients_bytes = draw.randint(0, 4) * memory.layout.buffer_elements(0)[0] * profile.element_bytes
    return profile, replace(hardware, host_bytes=least_bytes + gradients_bytes + offloaded_bytes)


def helped(seed: int, share: int) -> Case:
    """A machine whose GPU can help to update."""
    draw = random.Random(seed)
    profile, alone = measured(draw, seed, share=share), random_machine(draw)
    return updated_inside(profile, draw), that_streams(alone)


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
    "regions for gradients: a block is swapped beside input offload": lambda: sharing_regions(75),
    "regions for gradients: inputs alone are offloaded": lambda: sharing_regions(91),
    "the GPU helps, and inputs are offloaded": lambda: helped(10558, 4),
    "help gains less than the memory of its staging is worth": lambda: helped(13686, 16),
    "attention is kept": lambda: attending(37),
    "attention is not kept, as that gains too little": lambda: attending(52),
    "updates of the weight alone": lambda: tight_case(28),
    "updates of the weight alone, and less memory": lambda: tight_case(323),
    "ranks: a chunk gives up being persistent, and its buffer stays": lambda: of_ranks(108),
    "ranks: inputs are offloaded": lambda: of_ranks(151),
    "ranks: whole weights stay of chunks whose states are in host memory": lambda: of_ranks(183),
    "ranks: updates inside backward": lambda: of_ranks(247),
    "ranks: a swapped block, and a speculative update of the weight": lambda: of_ranks(272),
}


@pytest.mark.parametrize("name", CASES)
def test_no_plan_at_all_is_better(name: str) -> None:
    profile, hardware = CASES[name]()
    found = check_search(profile, hardware)
    assert found.world_size == hardware.world_size
