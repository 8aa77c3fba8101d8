"""split and join lose nothing, on every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain_kernels import join, join_reference, split, split_reference

LOWER_HALVES = (0x0000, 0x0001, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def _every_upper_half(lower: int) -> torch.Tensor:
    """65,536 fp32 values: every sign, exponent and upper mantissa above the given lower half."""
    return ((torch.arange(1 << 16, dtype=torch.int64) << 16) | lower).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("lower", LOWER_HALVES, ids=hex)
def test_every_upper_half_has_the_bits_of_the_reference_and_comes_back(backend: Any, lower: int) -> None:
    master = _every_upper_half(lower)
    weight, remainder = (part.cpu() for part in backend.split(master.to(backend.device)))
    expected_weight, expected_remainder = split_reference(master)
    assert torch.equal(weight.view(torch.int16), expected_weight.view(torch.int16))
    assert torch.equal(remainder, expected_remainder)
    back = backend.join(weight.to(backend.device), remainder.to(backend.device)).cpu()
    assert torch.equal(back.view(torch.int32), join_reference(weight, remainder).view(torch.int32))
    nan = master.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert weight[nan].isnan().all()
    assert back[nan].isnan().all()


@pytest.mark.parametrize("lower", LOWER_HALVES, ids=hex)
def test_weight_is_the_nearest_and_ties_go_away_from_zero(lower: int) -> None:
    master = _every_upper_half(lower)
    weight, _ = split(master)
    number = ~master.isnan()
    if lower == 0x8000:
        upper = (master.view(torch.int32) >> 16).to(torch.int16)
        assert torch.equal(weight.view(torch.int16)[number], (upper + 1)[number])
    else:
        rounded_by_torch = master.to(torch.bfloat16)
        assert torch.equal(weight.view(torch.int16)[number], rounded_by_torch.view(torch.int16)[number])


def test_a_value_whose_weight_overflows_comes_back() -> None:
    largest = torch.finfo(torch.float32).max
    weight, remainder = split(torch.tensor([largest, -largest]))
    assert weight.tolist() == [torch.inf, -torch.inf]
    assert remainder.tolist() == [-1, -1]
    assert join(weight, remainder).tolist() == [largest, -largest]


def test_nans_become_one_nan() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FFF8000, -0x7FFFFF, -1], dtype=torch.int32)
    weight, remainder = split(patterns.view(torch.float32))
    assert set(weight.view(torch.int16).tolist()) == {0x7FC0}
    assert set(remainder.tolist()) == {0}


@pytest.mark.parametrize("count", [1, 3, 1023, 1025])
def test_any_length_and_nothing_beyond_it(backend: Any, count: int) -> None:
    room = torch.linspace(-3, 3, count + 8, device=backend.device)
    weight, remainder = backend.split(room[:count])
    expected_weight, expected_remainder = split_reference(room[:count])
    assert torch.equal(weight, expected_weight)
    assert torch.equal(remainder, expected_remainder)


def test_outputs_are_written_where_they_are_given() -> None:
    master = torch.linspace(-2, 2, 300)
    weight, remainder = torch.empty(300, dtype=torch.bfloat16), torch.empty(300, dtype=torch.int16)
    assert split(master, weight, remainder)[0] is weight
    back = torch.full((300,), torch.nan)
    assert join(weight, remainder, back) is back
    assert torch.equal(back, master)


def test_bad_arguments_are_named() -> None:
    master = torch.zeros(8)
    with pytest.raises(ValueError, match=r"master must be torch\.float32"):
        split(master.double())
    with pytest.raises(ValueError, match="remainder has 4 elements and needs 8"):
        split(master, remainder=torch.zeros(4, dtype=torch.int16))
    with pytest.raises(ValueError, match="master must be 1-d and contiguous"):
        split(torch.zeros(8, 2)[:, 0])
    with pytest.raises(ValueError, match="weight overlaps master: pass memory of its own"):
        split(master, weight=master.view(torch.bfloat16)[:8])
