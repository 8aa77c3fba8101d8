"""A slice says which tiles it has whole. A row table is made once for given slices, and refuses too little room."""

from __future__ import annotations

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
