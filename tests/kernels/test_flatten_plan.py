"""A row table is made once for tensors that stay the same, and tells every program its tensor and place."""

from __future__ import annotations

import torch

from protrain_kernels import TILE, flatten, flatten_reference, unflatten_reference
from protrain_kernels.flatten import _table_of, table_for

TENSORS = [torch.zeros(20, 10), torch.zeros(2, 30)]


def test_every_program_knows_its_tensor_and_place() -> None:
    sizes = [2 * TILE, 5, 0, 4 * TILE + 1]
    table = table_for([torch.zeros(size) for size in sizes], [0, 2 * TILE, 0, 3 * TILE], [0, 2, 0, 3])
    assert table.slice_of.tolist() == [0, 1, 3, 3, 3]
    assert table.rows.tolist() == [
        [0, 0, 2 * TILE, 2 * TILE, 0, 0],
        [2 * TILE, 0, 5, 5, 2, 1],
        [0, 0, 0, 0, 0, 2],
        [3 * TILE, 0, 4 * TILE + 1, 4 * TILE + 1, 3, 2],
    ]


def test_flatten_makes_a_table_once() -> None:
    _table_of.cache_clear()
    for _ in range(3):
        flatten(TENSORS, torch.zeros(384), [0, 256])
    assert _table_of.cache_info().misses == 1
    for offset in (128, 256, 384):
        flatten(TENSORS[1:], torch.zeros(512), [offset])
    assert _table_of.cache_info().misses == 4


def test_unflatten_reference_is_the_inverse() -> None:
    chunk, back = torch.zeros(384), [torch.empty(20, 10), torch.empty(2, 30)]
    tensors = [torch.randn(20, 10), torch.randn(2, 30)]
    flatten_reference(tensors, chunk, [0, 256])
    unflatten_reference(chunk, back, [0, 256])
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
