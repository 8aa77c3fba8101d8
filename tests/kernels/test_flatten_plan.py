"""A plan is made once for tensors that stay the same, and refuses a chunk without room for them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from protrain_kernels import TILE, flatten, flatten_reference, unflatten_reference
from protrain_kernels.flatten_plan import FlattenPlan

TENSORS = [torch.zeros(20, 10), torch.zeros(2, 30)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offsets\[1\] is 256: .*128 of the chunk's 256 elements"):
        flatten(TENSORS, torch.zeros(256), [0, 256])
    with pytest.raises(ValueError, match=r"partial_offsets\[1\] is 1: it must leave room for 1 of 1 partials"):
        flatten(TENSORS, torch.zeros(384), [0, 256], torch.zeros(1), [0, 1])


def test_every_program_knows_its_tensor_and_place() -> None:
    sizes = [2 * TILE, 5, 0, 4 * TILE + 1]
    plan = FlattenPlan([torch.zeros(size) for size in sizes], [0, 2 * TILE, 0, 3 * TILE], [0, 2, 0, 3])
    assert plan._tensor_of.tolist() == [0, 1, 3, 3, 3]
    assert plan.rows.tolist() == [
        [2 * TILE, 0, 0, 0],
        [5, 2 * TILE, 2, 1],
        [0, 0, 0, 2],
        [4 * TILE + 1, 3 * TILE, 3, 2],
    ]


def test_flatten_makes_a_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("protrain_kernels.flatten")  # the package's attribute is the function
    monkeypatch.setattr(module, "_plans", {})
    made = []

    def make(*arguments: Any) -> FlattenPlan:
        made.append(arguments)
        return FlattenPlan(*arguments)

    monkeypatch.setattr(module, "FlattenPlan", make)
    monkeypatch.setattr(module, "_MOST_PLANS", 2)
    for _ in range(3):
        flatten(TENSORS, torch.zeros(384), [0, 256])
    assert len(made) == 1
    for offset in (128, 256, 384):
        flatten(TENSORS[1:], torch.zeros(512), [offset])
    assert len(made) == 4
    assert len(module._plans) == 2


def test_unflatten_reference_is_the_inverse() -> None:
    chunk, back = torch.zeros(384), [torch.empty(20, 10), torch.empty(2, 30)]
    tensors = [torch.randn(20, 10), torch.randn(2, 30)]
    flatten_reference(tensors, chunk, [0, 256])
    unflatten_reference(chunk, back, [0, 256])
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
