"""A slice says which tiles it has whole. A row table is made once for given slices, and refuses too little room."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain_kernels import TILE, Slice, fold
from protrain_kernels.fold import table_for


def _slice(**changes: int) -> Slice:
    return Slice(**{"offset": 0, "numel": 200, "first": 0, "parameter_numel": 200, "partial_offset": 0} | changes)


@pytest.mark.parametrize(
    ("first", "numel", "parameter_numel", "whole"),
    [
        (0, 200, 200, [0]),
        (0, 0, 200, []),
        (0, 0, 0, []),
        (0, 128, 200, []),  # the parameter goes on in another shard
        (128, 72, 200, []),  # it began in another shard
        (0, TILE, TILE, [0]),
        (0, TILE, TILE + 1, [0]),
        (TILE, 1, TILE + 1, [1]),
        (TILE, 0, TILE, []),
        (128, 3 * TILE, 4 * TILE, [1, 2]),
        (128, 4 * TILE - 128, 4 * TILE, [1, 2, 3]),
        (TILE + 128, TILE - 256, 4 * TILE, []),
        (2 * TILE, 2 * TILE - 128, 4 * TILE, [2]),
        (3 * TILE - 128, TILE + 135, 4 * TILE + 7, [3, 4]),
    ],
)
def test_whole_tiles(first: int, numel: int, parameter_numel: int, whole: list[int]) -> None:
    part = _slice(first=first, numel=numel, parameter_numel=parameter_numel)
    assert [*part.whole_tiles] == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 64}, "offset is 64: it must be a multiple of 128"),
        ({"offset": -128}, "offset is -128"),
        ({"first": 64}, "first is 64: it must be a multiple of 128"),
        ({"numel": -1}, "numel is -1: it must be at least 0"),
        ({"partial_offset": -1}, "partial_offset is -1: it must be at least 0"),
        ({"first": 128}, "200 elements from element 128 on reaches beyond its parameter, which has 200"),
        ({"numel": 100}, "numel is 100: it must be a multiple of 128 where the slice ends before its parameter"),
    ],
)
def test_impossible_slices_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _slice(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pieces": torch.zeros(2, 256).int()}, "pieces must be torch.bfloat16 or"),
        ({"pieces": torch._neg_view(torch.zeros(2, 256))}, "pieces is a view that negates"),
        ({"pieces": torch.zeros(256)}, r"pieces must be \[ranks, elements\], each contiguous"),
        ({"pieces": torch.zeros(256, 2).t()}, r"pieces must be \[ranks, elements\], each contiguous"),
        ({"pieces": torch.zeros(0, 256)}, "pieces of 0 ranks: fold 1 to 16 at a time"),
        ({"pieces": torch.zeros(17, 256)}, "pieces of 17 ranks: fold 1 to 16 at a time"),
        ({"pieces": torch.zeros(2, 200)}, "pieces have 200 elements each: pad them to a multiple of 128"),
        ({"pieces": torch.zeros(513)[1:].view(2, 256)}, "pieces must start at a multiple of 256 bytes"),
        ({"pieces": torch.zeros(2, 128)}, "the pieces reach to element 256 of 128"),
        ({"slices": [_slice(offset=128)]}, "the pieces reach to element 384 of 256"),
        ({"slices": [_slice(), _slice(offset=128)]}, r"piece 1 begins at 128, where another reaches to 256"),
        ({"gradient": torch.zeros(256).int()}, "gradient must be torch.bfloat16 or"),
        ({"gradient": torch.zeros(384)}, "gradient has 384 elements and needs 256"),
        ({"gradient": torch.zeros(257)[1:]}, "gradient must start at a multiple of 256 bytes"),
        ({"gradient": torch.zeros(256, device="meta")}, "gradient is on meta"),
        ({"accumulator": torch.zeros(256).bfloat16()}, "accumulator must be torch.float32"),
        ({"accumulator": torch.zeros(128)}, "accumulator has 128 elements and needs 256"),
        ({"gradient": None}, "fold has nowhere to write"),
        ({"gradient": None, "accumulator": torch.zeros(256)}, "partials are of the gradient"),
        ({"partials": torch.zeros(1).double()}, "partials must be torch.float32"),
        ({"slices": [_slice(partial_offset=1)]}, "the pieces write partials up to 2 of 1"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "pieces": torch.zeros(2, 256),
        "slices": [_slice()],
        "gradient": torch.zeros(256),
        "factor": 1.0,
        "partials": torch.zeros(1),
    }
    with pytest.raises(ValueError, match=message):
        fold(**(arguments | changes))


def test_a_gradient_that_is_the_accumulator_is_refused() -> None:
    same = torch.zeros(256)
    with pytest.raises(ValueError, match="gradient and accumulator are the same memory"):
        fold(torch.zeros(2, 256), [_slice()], gradient=same, accumulator=same, factor=1.0)


def test_partials_of_tiles_that_are_cut_need_no_room() -> None:
    """Only the first of the parameter's three tiles is whole, so one partial is enough."""
    part = _slice(numel=TILE + 128, parameter_numel=3 * TILE)
    gradient, partials = torch.zeros(part.padded), torch.zeros(1)
    fold(torch.ones(2, part.padded), [part], gradient=gradient, factor=1.0, partials=partials)
    assert partials.tolist() == [4.0 * TILE]


def test_fold_makes_a_table_once() -> None:
    table_for.cache_clear()
    pieces, gradient = torch.zeros(2, 512), torch.zeros(512)
    for _ in range(3):
        fold(pieces, [_slice(), _slice(offset=256)], gradient=gradient, factor=1.0)
    assert table_for.cache_info().misses == 1
    for offset in (0, 128, 256):
        fold(pieces, [_slice(offset=offset)], gradient=gradient, factor=1.0)
    assert table_for.cache_info().misses == 4
