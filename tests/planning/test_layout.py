"""Packing: every parameter in one place, in execution order, at the least waste, in equal shards for ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protrain.planning import Layout, choose_chunk_elements, pack
from protrain.planning.layout import FULL_RATE_ELEMENTS, TILE_ELEMENTS, align, summed_on_device
from protrain.planning.schedule import most_held
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import of_units


def members(layout: Layout) -> list[list[int]]:
    return [
        [s.parameter for s in sorted(layout.slots, key=lambda s: s.offset) if s.chunk == c.index] for c in layout.chunks
    ]


def check_layout(layout: Layout, profile: ModelProfile) -> None:
    """What holds for every layout."""
    assert [slot.parameter for slot in layout.slots] == list(range(len(profile.parameters)))
    for chunk, indices in zip(layout.chunks, members(layout), strict=True):
        end = 0
        for index in indices:
            slot = layout.slots[index]
            assert slot.offset % 128 == 0
            assert slot.offset >= end, "parameters overlap"
            assert slot.numel == profile.parameters[index].numel
            assert (profile.parameters[index].group >= 0) is chunk.trainable
            end = slot.offset + slot.numel
        assert end <= chunk.elements <= layout.chunk_elements or len(indices) == 1
        assert chunk.elements % 128 == 0
        assert chunk.elements - end < 128
    for unit, chunks in zip(profile.units, layout.unit_chunks, strict=True):
        assert chunks == tuple(sorted({layout.slots[index].chunk for index in unit.parameters}))


def test_tied_parameters_lie_at_their_first_use() -> None:
    profile = of_units([(None, [(256, 0)]), (0, [(256, 0)]), (None, [0])])
    layout = pack(profile, 256)
    check_layout(layout, profile)
    assert layout.unit_chunks == ((0,), (1,), (0,))


def test_frozen_parameters_have_their_own_chunks_in_execution_order() -> None:
    profile = of_units([(n, [(256, -1), (128, 0)]) for n in range(4)])
    layout = pack(profile, 512)
    check_layout(layout, profile)
    assert members(layout) == [[0, 2], [1, 3, 5, 7], [4, 6]]
    assert [chunk.trainable for chunk in layout.chunks] == [False, True, False]
    assert layout.unit_chunks[3] == (1, 2)


@pytest.mark.parametrize("chunk_elements", [100, 0, -128])
def test_a_wrong_chunk_size_is_named(chunk_elements: int) -> None:
    profile = of_units([(0, [(200, 0)])])
    with pytest.raises(ValueError, match=f"a multiple of 128 above 0, not {chunk_elements}"):
        pack(profile, chunk_elements)


BLOCKS: list[tuple[int | None, list[tuple[int, int]] | list[int]]] = [(n, [(256, 0), (128, 0)]) for n in range(12)]


def test_a_large_parameter_has_a_chunk_of_its_own() -> None:
    embedding, norm, head = (None, [(1000, 0)]), (None, [(100, 0)]), (None, [(890, -1)])
    profile = of_units([embedding, *BLOCKS, norm, head])
    layout = pack(profile, 384)
    check_layout(layout, profile)
    assert members(layout) == [[0], *([at, at + 1] for at in range(1, 25, 2)), [25], [26]]
    assert [chunk.elements for chunk in layout.chunks if layout.is_large(chunk)] == [1024, 896]
    assert wasted_elements(layout) == 384 - 128
    assert [layout.buffer_elements(n) for n in (0, 1, 13, 14, 15)] == [
        (384, 1024),
        (384, 896),
        (128, 896),
        (0, 896),
        (0, 0),
    ]
    # The head is frozen.
    assert [layout.gradient_elements(n) for n in (0, 1, 13, 14)] == [(384, 1024), (384, 0), (128, 0), (0, 0)]
    assert [layout.region_elements(n) for n in (0, 1, 2, 15)] == [(0, 384), (1024, 384), (1024, 384), (1024, 0)]


def test_what_units_hold_at_once_is_counted_by_kind() -> None:
    profile = of_units([(None, [(1000, 0)]), *BLOCKS, (None, [(100, 0)]), (None, [(890, 0)]), (None, [0, 25, 26])])
    usual, large = zip(*most_held(profile, pack(profile, 384)), strict=True)
    # The last unit holds embedding, norm and head; blocks hold one chunk.
    assert usual == (*[1] * 14, 0, 0)
    assert large == (2, *[1] * 14, 0)


@pytest.mark.parametrize(("embedding", "is_large"), [(384, False), (500, False), (600, True), (5000, True)])
def test_chunks_are_of_a_block_where_a_parameter_is_much_larger(embedding: int, is_large: bool) -> None:
    profile = of_units([(None, [(embedding, 0)]), *BLOCKS, (None, [0])])
    size = choose_chunk_elements(profile)
    assert (size == 384) if is_large else (size >= align(embedding))
    assert pack(profile, size).is_large(pack(profile, size).chunks[0]) is is_large


def test_blocks_that_are_next_to_nothing_do_not_make_thousands_of_chunks() -> None:
    """A large head for each of several tasks, say, behind scaled identities."""
    tiny = [(n, [(128, 0)]) for n in range(12)]
    heads = [(None, [(64_000, 0)]) for _ in range(12)]
    profile = of_units([*tiny, *heads])
    assert choose_chunk_elements(profile) >= 64_000


@pytest.mark.parametrize("seed", range(12))
def test_no_even_step_wastes_less_than_the_chosen_size(seed: int) -> None:
    draw = random.Random(seed)
    blocks = [(n, [(draw.randrange(500, 4000), draw.choice([0, 0, -1])) for _ in range(3)]) for n in range(12)]
    profile = of_units([(None, [(draw.randrange(2000, 9000), 0)]), *blocks, (None, [(128, 0)])])
    units = [[align(profile.parameters[index].numel) for index in unit.parameters] for unit in profile.units]
    lower = max(max(map(sum, units[1:-1])), *map(max, units))
    upper = max(lower + lower // 4, align(-(-sum(map(sum, units)) // 8)))
    grid = {lower, *(align(lower + (upper - lower) * step // 32) for step in range(33))}
    chosen = choose_chunk_elements(profile)
    best = min((wasted_elements(pack(profile, size)), size) for size in grid if size <= upper)
    assert (wasted_elements(pack(profile, chosen)), chosen) <= best


@pytest.mark.parametrize("n_blocks", [9, 10, 24, 59])
def test_a_chunk_is_about_a_block_whatever_the_depth(n_blocks: int) -> None:
    """Of several blocks a chunk would waste less where embedding and blocks happen to add up, and buffers take more."""
    large = 3 * FULL_RATE_ELEMENTS
    blocks = [(n, [(large // 3, 0)] * 3) for n in range(n_blocks)]
    profile = of_units([(None, [(large // 2, 0)]), *blocks, (None, [(7168, 0), (7168, 0)]), (None, [0])])
    layout = pack(profile)
    assert large <= layout.chunk_elements <= 1.25 * large
    assert n_blocks + 1 <= len(layout.chunks) <= n_blocks + 2


def test_sums_on_the_device_are_spread_evenly_and_end_with_backward() -> None:
    assert summed_on_device(10, 1, 4) == {1, 3, 5, 7}  # backward begins with chunk 9, and its sum in host memory
    assert summed_on_device(9, 0, 1) == {0}
    for n_chunks in range(1, 12):
        for n_persist in range(n_chunks + 1):
            offloaded = range(n_persist, n_chunks)
            for n_device_sum in range(len(offloaded) + 1):
                found = summed_on_device(n_chunks, n_persist, n_device_sum)
                assert len(found) == n_device_sum
                assert found <= set(offloaded)
                assert n_persist in found or not n_device_sum
                between = "".join("d" if chunk in found else "h" for chunk in offloaded).split("d")[1:-1]
                assert not between or max(map(len, between)) - min(map(len, between)) <= 1


def wasted_elements(layout: Layout) -> int:
    """Capacity that no parameter uses, over all chunks."""
    return sum(max(0, layout.chunk_elements - chunk.elements) for chunk in layout.chunks)


WORLD_SIZES = (2, 3, 4)


def random_profile(seed: int, *, most: int = 60_000) -> ModelProfile:
    """Units of parameters of all sizes, some of them frozen, and one that is tied."""
    draw = random.Random(seed)
    units: list[Any] = [
        (n, [(draw.randrange(1, most), draw.choice([0, 0, 1, -1])) for _ in range(draw.randrange(1, 5))])
        for n in range(8)
    ]
    return of_units([*units, (None, [0])])


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


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_buffers_and_staging_serve_persistent_chunks_too(world_size: int) -> None:
    embedding, blocks, head = (None, [(1536, 0)]), [(n, [(384, 0)]) for n in range(12)], (None, [(3072, -1)])
    profile = of_units([embedding, *blocks, head])
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
