"""A row table is made once for tensors that stay the same, and refuses a chunk without room for them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from protrain_kernels import TILE, flatten, flatten_reference, unflatten_reference
from protrain_kernels.flatten import table_for
from protrain_kernels.slices import RowTable

TENSORS = [torch.zeros(20, 10), torch.zeros(2, 30)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"piece 1 takes elements 256 to 384 of 256: leave it room"):
        flatten(TENSORS, torch.zeros(256), [0, 256])
    with pytest.raises(ValueError, match=r"piece 1 writes partials up to 2 of 1"):
        flatten(TENSORS, torch.zeros(384), [0, 256], torch.zeros(1), [0, 1])


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


def test_flatten_makes_a_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("protrain_kernels.flatten")  # the package's attribute is the function
    monkeypatch.setattr(module, "_tables", {})
    made = []

    def make(*arguments: Any) -> RowTable:
        made.append(arguments)
        return RowTable(*arguments)

    monkeypatch.setattr(module, "RowTable", make)
    monkeypatch.setattr(module, "_MOST_TABLES", 2)
    for _ in range(3):
        flatten(TENSORS, torch.zeros(384), [0, 256])
    assert len(made) == 1
    for offset in (128, 256, 384):
        flatten(TENSORS[1:], torch.zeros(512), [offset])
    assert len(made) == 4
    assert len(module._tables) == 2


def test_unflatten_reference_is_the_inverse() -> None:
    chunk, back = torch.zeros(384), [torch.empty(20, 10), torch.empty(2, 30)]
    tensors = [torch.randn(20, 10), torch.randn(2, 30)]
    flatten_reference(tensors, chunk, [0, 256])
    unflatten_reference(chunk, back, [0, 256])
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
