"""Packing: every parameter in one place, in execution order, at the least waste."""

from __future__ import annotations

import random

import pytest

from protrain.planning import Layout, choose_chunk_elements, pack
from protrain.planning.layout import FULL_RATE_ELEMENTS, align, most_held, summed_on_device
from protrain.profiler.model_profile import ModelProfile, ParameterRecord, UnitRecord
from tests.planning.counts import wasted_elements


def make_profile(units: list[tuple[int | None, list[tuple[int, int]] | list[int]]]) -> ModelProfile:
    """Units as (block, parameters); a parameter is (elements, group), or the index of an earlier one that is tied."""
    parameters: list[ParameterRecord] = []
    records = []
    for number, (block, members) in enumerate(units):
        used = []
        for member in members:
            if isinstance(member, int):
                used.append(member)
                continue
            used.append(len(parameters))
            parameters.append(ParameterRecord(name=f"p{len(parameters)}", shape=(member[0],), group=member[1]))
        records.append(UnitRecord(name=f"u{number}", block=block, parameters=tuple(used)))
    return ModelProfile(
        model="M",
        dtype="bfloat16",
        device="cpu",
        batch_shapes={"x": (2, 4)},
        tokens=8,
        buffer_bytes=0,
        parameters=tuple(parameters),
        units=tuple(records),
        calls=tuple(range(len(records))),
        blocks=(),
        segments=(),
    )


def _chunks(layout: Layout) -> list[list[int]]:
    return [
        [s.parameter for s in sorted(layout.slots, key=lambda s: s.offset) if s.chunk == c.index] for c in layout.chunks
    ]


def check_layout(layout: Layout, profile: ModelProfile) -> None:
    """What holds for every layout."""
    assert [slot.parameter for slot in layout.slots] == list(range(len(profile.parameters)))
    for chunk, members in zip(layout.chunks, _chunks(layout), strict=True):
        end = 0
        for index in members:
            slot = layout.slots[index]
            assert slot.offset % 128 == 0
            assert slot.offset >= end, "parameters overlap"
            assert slot.numel == profile.parameters[index].numel
            assert (profile.parameters[index].group >= 0) is chunk.trainable
            end = slot.offset + slot.numel
        assert end <= chunk.elements <= layout.chunk_elements or len(members) == 1
        assert chunk.elements % 128 == 0
        assert chunk.elements - end < 128
    for unit, chunks in zip(profile.units, layout.unit_chunks, strict=True):
        assert chunks == tuple(sorted({layout.slots[index].chunk for index in unit.parameters}))


def test_units_stay_together_and_in_order() -> None:
    profile = make_profile([(None, [(100, 0)]), (0, [(200, 0), (60, 0)]), (1, [(200, 0), (60, 0)]), (None, [(10, 0)])])
    layout = pack(profile, 640)
    check_layout(layout, profile)
    # 128 + 256 + 128 = 512 fit; the next block's 384 do not, and are not split.
    assert _chunks(layout) == [[0, 1, 2], [3, 4, 5]]
    assert layout.unit_chunks == ((0,), (0,), (1,), (1,))


def test_a_unit_larger_than_a_chunk_spreads() -> None:
    profile = make_profile([(0, [(256, 0), (256, 0), (128, 0)]), (1, [(128, 0)])])
    layout = pack(profile, 384)
    check_layout(layout, profile)
    assert _chunks(layout) == [[0], [1, 2], [3]]
    assert layout.unit_chunks[0] == (0, 1)


def test_tied_parameters_lie_at_their_first_use() -> None:
    profile = make_profile([(None, [(256, 0)]), (0, [(256, 0)]), (None, [0])])
    layout = pack(profile, 256)
    check_layout(layout, profile)
    assert layout.unit_chunks == ((0,), (1,), (0,))


def test_frozen_parameters_have_their_own_chunks_in_execution_order() -> None:
    profile = make_profile([(n, [(256, -1), (128, 0)]) for n in range(4)])
    layout = pack(profile, 512)
    check_layout(layout, profile)
    assert _chunks(layout) == [[0, 2], [1, 3, 5, 7], [4, 6]]
    assert [chunk.trainable for chunk in layout.chunks] == [False, True, False]
    assert layout.unit_chunks[3] == (1, 2)


def test_groups_are_sorted_inside_a_unit_only() -> None:
    profile = make_profile([(0, [(128, 1), (128, 0), (128, 1)]), (1, [(128, 0)])])
    assert _chunks(pack(profile, 512)) == [[1, 0, 2, 3]]


@pytest.mark.parametrize("chunk_elements", [100, 0, -128])
def test_a_wrong_chunk_size_is_named(chunk_elements: int) -> None:
    profile = make_profile([(0, [(200, 0)])])
    with pytest.raises(ValueError, match=f"a multiple of 128 above 0, not {chunk_elements}"):
        pack(profile, chunk_elements)


BLOCKS: list[tuple[int | None, list[tuple[int, int]] | list[int]]] = [(n, [(256, 0), (128, 0)]) for n in range(12)]


def test_a_large_parameter_has_a_chunk_of_its_own() -> None:
    embedding, norm, head = (None, [(1000, 0)]), (None, [(100, 0)]), (None, [(890, -1)])
    profile = make_profile([embedding, *BLOCKS, norm, head])
    layout = pack(profile, 384)
    check_layout(layout, profile)
    assert _chunks(layout) == [[0], *([at, at + 1] for at in range(1, 25, 2)), [25], [26]]
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


def test_large_parameters_lie_where_they_are_first_used() -> None:
    tied = make_profile([(None, [(1000, 0), (128, 0)]), *BLOCKS, (None, [0])])
    assert _chunks(pack(tied, 384))[:2] == [[0], [1]]
    both = make_profile([(None, [(1000, 0)]), (None, [(1000, -1)]), *BLOCKS])
    assert [chunk.trainable for chunk in pack(both, 384).chunks[:3]] == [True, False, True]
    after = make_profile([(None, [(128, 0)]), (None, [(1000, 0)]), *BLOCKS])
    assert _chunks(pack(after, 384))[:2] == [[0], [1]]


def test_what_units_hold_at_once_is_counted_by_kind() -> None:
    profile = make_profile([(None, [(1000, 0)]), *BLOCKS, (None, [(100, 0)]), (None, [(890, 0)]), (None, [0, 25, 26])])
    usual, large = zip(*most_held(profile, pack(profile, 384)), strict=True)
    # The last unit holds embedding, norm and head; blocks hold one chunk.
    assert usual == (*[1] * 14, 0, 0)
    assert large == (2, *[1] * 14, 0)


@pytest.mark.parametrize(("embedding", "is_large"), [(384, False), (500, False), (600, True), (5000, True)])
def test_chunks_are_of_a_block_where_a_parameter_is_much_larger(embedding: int, is_large: bool) -> None:
    profile = make_profile([(None, [(embedding, 0)]), *BLOCKS, (None, [0])])
    size = choose_chunk_elements(profile)
    assert (size == 384) if is_large else (size >= align(embedding))
    assert pack(profile, size).is_large(pack(profile, size).chunks[0]) is is_large


def test_blocks_that_are_next_to_nothing_do_not_make_thousands_of_chunks() -> None:
    """A large head for each of several tasks, say, behind scaled identities."""
    tiny = [(n, [(128, 0)]) for n in range(12)]
    heads = [(None, [(64_000, 0)]) for _ in range(12)]
    profile = make_profile([*tiny, *heads])
    assert choose_chunk_elements(profile) >= 64_000


def test_the_chosen_size_is_one_block_for_equal_blocks() -> None:
    profile = make_profile([(n, [(1280, 0), (1280, 0), (128, 0)]) for n in range(12)])
    size = choose_chunk_elements(profile)
    assert wasted_elements(pack(profile, size)) == 0
    assert len(pack(profile, size).chunks) >= 8


def test_the_chosen_size_wastes_least_of_a_plain_grid() -> None:
    blocks = [(n, [(3000, 0), (700 + 64 * (n % 3), 0), (128, 0)]) for n in range(10)]
    profile = make_profile([(None, [(5000, 0)]), *blocks, (None, [(128, 0)]), (None, [(5000, 0)])])
    size = choose_chunk_elements(profile)
    layout = pack(profile, size)
    check_layout(layout, profile)
    assert layout.chunk_elements >= 5120
    grid = range(5120, 5120 + 5120 // 4 + 1, 128)
    within = min(wasted_elements(pack(profile, candidate)) for candidate in grid)
    assert wasted_elements(layout) <= 1.25 * within


@pytest.mark.parametrize("seed", range(12))
def test_no_even_step_wastes_less_than_the_chosen_size(seed: int) -> None:
    draw = random.Random(seed)
    blocks = [(n, [(draw.randrange(500, 4000), draw.choice([0, 0, -1])) for _ in range(3)]) for n in range(12)]
    profile = make_profile([(None, [(draw.randrange(2000, 9000), 0)]), *blocks, (None, [(128, 0)])])
    units = [[align(profile.parameters[index].numel) for index in unit.parameters] for unit in profile.units]
    lower = max(max(map(sum, units[1:-1])), *map(max, units))
    upper = max(lower + lower // 4, align(-(-sum(map(sum, units)) // 8)))
    grid = {lower, *(align(lower + (upper - lower) * step // 32) for step in range(33))}
    chosen = choose_chunk_elements(profile)
    best = min((wasted_elements(pack(profile, size)), size) for size in grid if size <= upper)
    assert (wasted_elements(pack(profile, chosen)), chosen) <= best


@pytest.mark.parametrize("n_blocks", range(9, 60))
def test_a_chunk_is_about_a_block_whatever_the_depth(n_blocks: int) -> None:
    """Of several blocks a chunk would waste less where embedding and blocks happen to add up, and buffers take more."""
    large = 3 * FULL_RATE_ELEMENTS
    blocks = [(n, [(large // 3, 0)] * 3) for n in range(n_blocks)]
    profile = make_profile([(None, [(large // 2, 0)]), *blocks, (None, [(7168, 0), (7168, 0)]), (None, [0])])
    layout = pack(profile)
    assert large <= layout.chunk_elements <= 1.25 * large
    assert n_blocks + 1 <= len(layout.chunks) <= n_blocks + 2


def test_small_blocks_share_chunks_of_the_size_from_where_transfers_are_fast() -> None:
    profile = make_profile([(n, [(FULL_RATE_ELEMENTS // 16, 0)]) for n in range(400)])
    layout = pack(profile)
    assert layout.chunk_elements == FULL_RATE_ELEMENTS // 16, "none wastes less"
    draw = random.Random(0)
    uneven = make_profile(
        [(n, [(draw.randrange(FULL_RATE_ELEMENTS // 32, FULL_RATE_ELEMENTS // 16), 0)]) for n in range(200)]
    )
    assert FULL_RATE_ELEMENTS / 2 < choose_chunk_elements(uneven) <= FULL_RATE_ELEMENTS


def test_packing_is_deterministic_and_survives_json() -> None:
    profile = make_profile([(n, [(1000 + n, 0), (333, n % 2)]) for n in range(6)])
    layout = pack(profile, 2048)
    assert pack(profile, 2048) == layout
    assert Layout.from_json(layout.to_json()) == layout


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
