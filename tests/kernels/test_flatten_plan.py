"""A plan refuses tensors that it wasn't made for, and is made once for tensors that stay the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from protrain_kernels import TILE, FlattenPlan, flatten, flatten_reference, padded, tiles, unflatten_reference
from protrain_kernels.strided import collapsed, overlaps_itself

TENSORS = [torch.zeros(20, 10), torch.zeros(30, 2).t()]


def _plan() -> FlattenPlan:
    return FlattenPlan(TENSORS, [0, 256], [0, 1])


def test_a_plan_serves_new_tensors_of_the_same_layout(same_bits: Callable[..., None]) -> None:
    plan = _plan()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(20, 10, generator=generator), torch.randn(30, 2, generator=generator).t()]
        chunk, partials = torch.full((384,), torch.nan), torch.full((2,), torch.nan)
        expected, sums = chunk.clone(), partials.clone()
        plan.flatten(tensors, chunk, partials)
        flatten_reference(tensors, expected, [0, 256], sums, [0, 1])
        same_bits(chunk, expected)
        same_bits(partials, sums)
        back = [torch.zeros(20, 10), torch.zeros(30, 2).t()]
        plan.unflatten(chunk, back)
        assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(20, 11), TENSORS[1]], r"tensors\[0\] isn't what the plan was made for: shape .*20, 11"),
        ([TENSORS[0], torch.zeros(2, 30)], r"tensors\[1\] isn't what the plan was made for: stride \(30, 1\)"),
        (
            [TENSORS[0].half(), TENSORS[1]],
            r"tensors\[0\] isn't .*type torch.float16 and not torch.float32; make another",
        ),
        ([torch.zeros(20, 10, device="meta"), TENSORS[1]], r"tensors\[0\] isn't .*device meta"),
        (TENSORS[:1], "the plan is for 2 tensors, not 1"),
    ],
)
def test_other_tensors_are_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _plan().flatten(tensors, torch.zeros(384))
    with pytest.raises(ValueError, match=message):
        _plan().unflatten(torch.zeros(384), tensors)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"offsets\[1\] is 256: .*128 of the chunk's 256 elements"):
        _plan().flatten(TENSORS, torch.zeros(256))
    with pytest.raises(ValueError, match=r"partial_offsets\[1\] is 1: it must leave room for 1 of 1 partials"):
        _plan().flatten(TENSORS, torch.zeros(384), torch.zeros(1))
    with pytest.raises(ValueError, match="the plan has no partial_offsets"):
        FlattenPlan(TENSORS, [0, 256]).flatten(TENSORS, torch.zeros(384), torch.zeros(2))
    with pytest.raises(ValueError, match="at least one tensor"):
        FlattenPlan([], [])
    with pytest.raises(ValueError, match=r"tensors\[1\] is on meta, tensors\[0\] on cpu"):
        FlattenPlan([torch.zeros(1), torch.zeros(1, device="meta")], [0, 128])


def test_every_program_knows_its_tensor_and_place() -> None:
    sizes = [2 * TILE, 5, 0, 4 * TILE + 1]
    plan = FlattenPlan([torch.zeros(size) for size in sizes], [0, 2 * TILE, 0, 3 * TILE], [0, 2, 0, 3])
    assert plan._tensor_of.tolist() == [0, 1, 3, 3, 3]
    assert [row[:4] for row in plan._rows.tolist()] == [
        [2 * TILE, 0, 0, 0],
        [5, 2 * TILE, 2, 1],
        [0, 0, 0, 2],
        [4 * TILE + 1, 3 * TILE, 3, 2],
    ]
    assert plan.chunk_elements == 3 * TILE + padded(4 * TILE + 1)
    assert plan.partial_elements == 3 + tiles(4 * TILE + 1)


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
    chunk, back = torch.zeros(384), [torch.empty(20, 10), torch.empty(30, 2).t()]
    tensors = [torch.randn(20, 10), torch.randn(30, 2).t()]
    flatten_reference(tensors, chunk, [0, 256])
    unflatten_reference(chunk, back, [0, 256])
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4, 5), ([60], [1])),
        (torch.zeros(3, 4, 5).transpose(1, 2), ([3, 5, 4], [20, 1, 5])),
        (torch.zeros(3, 4, 5)[:, :, :2], ([12, 2], [5, 1])),
        (torch.zeros(3, 1, 5)[:, :, ::2], ([3, 3], [5, 2])),
        (torch.zeros(()), ([], [])),
        (torch.zeros(1).expand(6), ([6], [0])),
    ],
)
def test_collapsed(tensor: torch.Tensor, expected: tuple[list[int], list[int]]) -> None:
    assert collapsed(tensor.shape, tensor.stride()) == expected


def test_overlaps() -> None:
    assert not overlaps_itself([3, 5, 4], [20, 1, 5])
    assert overlaps_itself([6], [0])
    assert overlaps_itself([4, 4], [1, 2])
    assert not overlaps_itself([], [])
