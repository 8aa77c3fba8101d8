"""split and join lose nothing."""

from __future__ import annotations

import pytest
import torch

from protrain_kernels import join, split

LOWER_HALVES = (0x0000, 0x0001, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def _every_upper_half(lower: int) -> torch.Tensor:
    """65,536 fp32 values: every sign, exponent and upper mantissa above the given lower half."""
    return ((torch.arange(1 << 16, dtype=torch.int64) << 16) | lower).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("lower", LOWER_HALVES, ids=hex)
def test_every_upper_half_comes_back_and_ties_go_away_from_zero(lower: int) -> None:
    master = _every_upper_half(lower)
    weight, remainder = split(master)
    back, number = join(weight, remainder), ~master.isnan()
    assert torch.equal(back.view(torch.int32)[number], master.view(torch.int32)[number])
    assert weight[~number].isnan().all()
    assert back[~number].isnan().all()
    nearest = master.to(torch.bfloat16).view(torch.int16)
    if lower == 0x8000:
        nearest = (master.view(torch.int32) >> 16).to(torch.int16) + 1
    assert torch.equal(weight.view(torch.int16)[number], nearest[number])


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


def test_any_shape_and_stride() -> None:
    master = torch.linspace(-2, 2, 300).view(20, 15).t()
    weight, remainder = split(master)
    assert weight.shape == remainder.shape == (15, 20)
    assert torch.equal(join(weight, remainder), master)
