"""Several ranks: what each of them has of every chunk, on the device and in host memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, Layout, MemoryModel, Plan, block_modes, check, evaluate, pack, search
from protrain.planning.layout import TILE_ELEMENTS, align, most_held
from protrain.planning.memory import state_bytes
from protrain.planning.plan import Counts, layout_of
from protrain.profiler.model_profile import ModelProfile
from tests.planning import test_layout, test_search
from tests.planning.machines import H100

MIB = 1024**2
WORLD_SIZES = (2, 3, 4)
NONE = BlockMode.NONE


def random_profile(seed: int, *, most: int = 60_000) -> ModelProfile:
    """Units of parameters of all sizes, some of them frozen, and one that is tied."""
    draw = random.Random(seed)
    units: list[Any] = [
        (n, [(draw.randrange(1, most), draw.choice([0, 0, 1, -1])) for _ in range(draw.randrange(1, 5))])
        for n in range(8)
    ]
    return test_layout.make_profile([*units, (None, [0])])


# -- layout ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_shards_are_equal_and_offsets_do_not_depend_on_their_number(seed: int, world_size: int) -> None:
    profile = random_profile(seed)
    for chunk_elements in (None, 4096, 65536):
        alone, layout = pack(profile, chunk_elements), pack(profile, chunk_elements, world_size)
        assert layout.slots == alone.slots
        assert layout.unit_chunks == alone.unit_chunks
        assert layout.chunk_elements == alone.chunk_elements
        for chunk, whole in zip(layout.chunks, alone.chunks, strict=True):
            assert chunk.trainable is whole.trainable
            assert world_size * layout.shard_elements(chunk) == chunk.elements
            assert layout.shard_elements(chunk) % 128 == 0
            assert 0 <= chunk.elements - whole.elements < 128 * world_size
            if not layout.is_large(chunk):
                assert layout.shard_elements(chunk) <= layout.usual_shard_elements
        assert Layout.from_json(layout.to_json()) == layout


def test_one_rank_has_whole_chunks() -> None:
    layout = pack(random_profile(0), 4096)
    assert pack(random_profile(0), 4096, 1) == layout
    assert [layout.shard_elements(chunk) for chunk in layout.chunks] == [chunk.elements for chunk in layout.chunks]
    assert layout.usual_shard_elements == 4096
    assert layout.reduction_elements() == (0, 0)
    assert layout.cut_tiles() == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_buffers_and_staging_serve_persistent_chunks_too(world_size: int) -> None:
    embedding, blocks, head = (None, [(1536, 0)]), [(n, [(384, 0)]) for n in range(12)], (None, [(3072, -1)])
    profile = test_layout.make_profile([embedding, *blocks, head])
    layout = pack(profile, 768, world_size)
    usual = align(768, world_size)  # 768 or 1024
    for n_persist in range(len(layout.chunks) + 1):
        assert layout.buffer_elements(n_persist) == (usual, 3072)
        assert layout.reduction_elements() == (usual, 1536), "the head is frozen"
        assert most_held(profile, layout)[n_persist] == (1, 1)
    shard, large_shard = usual // world_size, 1536 // world_size
    assert [layout.gradient_elements(n) for n in (0, 1, 7)] == [(shard, large_shard), (shard, 0), (0, 0)]
    assert [layout.region_elements(n) for n in (0, 1, 7)] == [(0, shard), (large_shard, shard), (large_shard, 0)]
    # Two whole gradients are sent and one is received; the embedding has one of each; shards are offloaded.
    between = 3 * usual + 2 * 1536
    assert [layout.staging_bytes(n, 1) for n in (0, 1, 7)] == [
        between + 2 * shard + large_shard,
        between + 2 * shard,
        between,
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_the_tiles_whose_elements_lie_in_several_shards_are_known(seed: int, world_size: int) -> None:
    profile = random_profile(seed, most=200_000)
    layout = pack(profile, 300_032, world_size)
    cut = []
    for slot in sorted(layout.slots, key=lambda slot: (slot.chunk, slot.offset)):
        shard = layout.shard_elements(layout.chunks[slot.chunk])
        for tile, first in enumerate(range(0, slot.numel, TILE_ELEMENTS)):
            last = min(first + TILE_ELEMENTS, slot.numel) - 1
            if (slot.offset + first) // shard != (slot.offset + last) // shard:
                cut += [(slot.parameter, tile)] if layout.chunks[slot.chunk].trainable else []
    assert cut, "the case is too easy"
    assert layout.cut_tiles() == cut
    trainable = [parameter for parameter in profile.parameters if parameter.group >= 0]
    n_tiles = sum(-(-parameter.numel // TILE_ELEMENTS) for parameter in trainable)
    assert layout.n_tiles == n_tiles
    own = 4 * n_tiles + 2 * TILE_ELEMENTS * len(cut)
    assert layout.exchange_bytes(2) == 2 * own, "what the rank has itself, and what it has of all"


def test_shards_of_less_than_a_tile_cut_a_tile_once() -> None:
    layout = pack(test_layout.make_profile([(0, [(1024, 0)])]), 1024, 4)
    assert layout.shard_elements(layout.chunks[0]) == 256
    assert layout.cut_tiles() == [(0, 0)]


# -- memory ------------------------------------------------------------------------------------------------------------

N = 8 * MIB  # elements of a chunk of the small model


def memory_of(world_size: int, profile: ModelProfile, hardware: HardwareProfile = H100, **options: Any) -> MemoryModel:
    machine = replace(hardware, world_size=world_size)
    return MemoryModel(profile, machine, pack(profile, N, world_size), **options)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_rank_has_its_part_of_the_states(world_size: int, accumulation: int) -> None:
    profile = replace(test_search.make_profile(4), accumulation=accumulation)
    memory = memory_of(world_size, profile, replace(H100, streamed_adam_gparams=None))
    layout, modes = memory.layout, block_modes(4, 0, 4)
    activations = memory.activations(modes)
    per_element = 16 if accumulation > 1 else 14
    everything = sum(state_bytes(chunk, profile, gradient_bytes=per_element - 12) for chunk in layout.chunks)
    for n_persist in range(7):
        away = layout.chunks[n_persist:]
        on_device = memory.static_parts(n_persist, 1)["persistent chunks"]
        in_host = per_element * sum(chunk.elements for chunk in away) // world_size
        assert on_device + in_host == everything // world_size
        if accumulation == 1:
            counts = Counts(n_persist, 1, 0, 4)
            least = memory.host_bytes(Counts(6, 1, 0, 4), activations)
            assert memory.host_bytes(counts, activations) - least == in_host
            copies = memory.copy_bytes(n_persist, len(away), 1 if away else 0)
            shards = [chunk.elements // world_size for chunk in away]
            assert copies == 12 * sum(shards[1:]) + 2 * sum(shards[:1])


def test_the_parts_of_device_memory_by_hand() -> None:
    profile = test_search.make_profile(4)  # six chunks of 8 Mi elements
    one, two, three = (memory_of(world_size, profile).static_parts(2, 4) for world_size in (1, 2, 3))
    assert one == {
        "persistent chunks": 2 * N * 14,
        "chunk buffers": 4 * N * 2,
        "gradient staging": 2 * N * 2 + 4 * 6 * 512,
        "buffers and quantised weights": 0,
        "staging for streamed updates": 128 * MIB,
    }
    assert two == {
        "persistent chunks": 2 * N * 14 // 2,
        "chunk buffers": 4 * N * 2,
        "gradient staging": 3 * N * 2 + 2 * N // 2 * 2 + 2 * 4 * 6 * 512,
        "buffers and quantised weights": 0,
        "staging for streamed updates": 128 * MIB,
        "NCCL and its contexts": (1016 + 2 * 384) * MIB,
    }
    padded = 21846 * 384  # elements; a third of it is no whole number of tiles, so two tiles of every chunk are cut
    assert padded - 384 < N < padded
    assert three == {
        "persistent chunks": 2 * padded * 14 // 3,
        "chunk buffers": 4 * padded * 2,
        "gradient staging": 3 * padded * 2 + 2 * (padded // 3) * 2 + 2 * (4 * 6 * 512 + 2 * 16384 * 2 * 6),
        "buffers and quantised weights": 0,
        "staging for streamed updates": 2 * 18 * (padded // 3),
        "NCCL and its contexts": (1016 + 3 * 384) * MIB,
    }
    on_cpu = memory_of(2, profile, replace(H100, device_type="cpu")).static_parts(2, 4)
    assert "NCCL and its contexts" not in on_cpu


def test_what_nccl_takes_depends_on_the_ranks_of_a_machine_and_on_how_they_are_connected() -> None:
    fast = replace(H100, all_gather_gbps=268.0)
    through_host = replace(H100, all_gather_gbps=H100.h2d_gbps / 2)
    several: dict[str, Any] = {"world_size": 16, "n_nodes": 2}
    assert [replace(fast, world_size=n).collective_bytes // MIB for n in (1, 2, 4, 8)] == [0, 1784, 2552, 4088]
    assert replace(fast, **several).collective_bytes == replace(fast, world_size=8).collective_bytes
    assert replace(through_host, **several).collective_bytes == 600 * MIB


def test_whole_weights_of_all_chunks_may_stay() -> None:
    profile = test_search.make_profile(4)
    memory = memory_of(2, profile)
    for n_persist in range(7):
        assert (memory.least_buffers(n_persist), memory.all_buffers(n_persist)) == (1, 6)
    plan = evaluate(profile, memory.hardware, n_persist=6, n_buffer=6, n_swap=0, n_ckpt=0, chunk_elements=N)
    assert layout_of(profile, plan) == memory.layout
    with pytest.raises(ValueError, match=r"n_buffer must be 1 to 6, not 0: a unit holds up to 1 chunks at once"):
        evaluate(profile, memory.hardware, n_persist=6, n_buffer=0, n_swap=0, n_ckpt=0, chunk_elements=N)


def test_the_same_chunks_on_two_devices_take_less_of_each() -> None:
    profile = test_search.make_profile(6, elements=64 * MIB)
    made, sizes = {}, []  # without what NCCL takes
    for world_size in (1, 2, 4):
        machine = replace(H100, world_size=world_size)
        made[world_size] = evaluate(profile, machine, n_persist=7, n_buffer=1, n_swap=0, n_ckpt=6)
        sizes.append(made[world_size].device_bytes - machine.collective_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[1] > 2.5 * 1024**3
    assert [made[1].host_bytes > plan.host_bytes for plan in made.values()] == [False, True, True]


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_for_another_number_of_ranks_is_refused_with_the_remedy() -> None:
    profile, machine = test_search.make_profile(4), replace(H100, world_size=2)
    plan = search(profile, machine)
    assert (plan.world_size, Plan.from_json(plan.to_json())) == (2, plan)
    assert "world_size=2" in str(plan)
    assert check(plan, profile, machine) == plan
    assert plan.tokens_per_s == pytest.approx(2 * profile.tokens / plan.step_ms * 1e3)
    for other in (1, 3):
        with pytest.raises(ValueError, match=f"made for world_size=2, and here it is {other}.*start 2 processes"):
            check(plan, profile, replace(H100, world_size=other))
    with pytest.raises(ValueError, match=r"world_size=1, and here it is 2.*start 1 process, make a new plan"):
        check(search(profile, H100), profile, machine)
    with pytest.raises(ValueError, match=r"Plan\.world_size must be at least 1, not 0"):
        replace(plan, world_size=0)
