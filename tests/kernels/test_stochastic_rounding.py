"""Moments in bf16 lose nothing in the mean, where rounding to nearest would have them stand still."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from protrain_kernels import adam, adam_scalars
from protrain_kernels.stochastic_rounding import round_moments_reference

COUNT = 1 << 18


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _share(values: Tensor) -> Tensor:
    """How far each lies from its bf16 neighbour nearer to zero to the other, 0 to 1."""
    return (_bits(values) & 0xFFFF).float() / 65536


def _away(values: Tensor, rounded: Tensor) -> Tensor:
    """1 where the one further from zero was taken."""
    return (rounded.float().abs() > values.abs()).float()


def _moments(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    m, root = torch.randn(2, COUNT, generator=generator).unbind()
    return m.clone(), root.square()


def test_each_neighbour_is_taken_as_often_as_its_share() -> None:
    for values, rounded in zip(_moments(), round_moments_reference(*_moments(), 7), strict=True):
        assert rounded.dtype is torch.bfloat16
        lower = (_bits(values) >> 16 << 16).view(torch.float32)
        upper = ((_bits(values) >> 16) + 1 << 16).view(torch.float32)
        assert ((rounded.float() == lower) | (rounded.float() == upper)).all(), "not a neighbour"
        share, away = _share(values), _away(values, rounded)
        for tenth in range(10):
            inside = (share >= tenth / 10) & (share < (tenth + 1) / 10)
            # 26,000 samples: a standard error of at most 0.003.
            assert away[inside].mean().item() == pytest.approx(tenth / 10 + 0.05, abs=0.012)


def test_what_is_rounded_in_one_place_says_nothing_about_another() -> None:
    """Of both moments, of neighbouring elements, and of the same values in the next step."""
    m, v = _moments()
    first, second = round_moments_reference(m, v, 7), round_moments_reference(m, v, 8)
    errors = [_away(values, rounded) - _share(values) for values, rounded in zip((m, v), first, strict=True)]
    later = [_away(values, rounded) - _share(values) for values, rounded in zip((m, v), second, strict=True)]
    pairs = [(errors[0], errors[1]), *zip(errors, later, strict=True), *((e[1:], e[:-1]) for e in errors)]
    for one, other in pairs:
        correlation = torch.corrcoef(torch.stack([one, other]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(COUNT)


def test_special_values() -> None:
    largest, beyond = 3.3895313892515355e38, 3.4028234663852886e38  # of bf16, of fp32
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest, beyond, -beyond, 1.0, -2.5])
    expected = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest, largest, -largest, 1.0, -2.5])
    special[4:5] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # truncated it would be infinite
    for step in range(1, 200):
        for other in (torch.zeros(len(special)), torch.full((len(special),), 0.3)):
            for rounded in (
                round_moments_reference(special, other, step)[0],
                round_moments_reference(other, special, step)[1],
            ):
                nan = expected.isnan()
                assert torch.equal(rounded.isnan(), nan)
                assert torch.equal(_bits(rounded.float())[~nan], _bits(expected)[~nan])


def test_what_bfloat16_has_comes_back() -> None:
    """So moments that were saved as fp32 are, once loaded, what they were."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()]
    for rounded in round_moments_reference(every.float(), every.float().flip(0).clone(), 5)[:1]:
        assert torch.equal(rounded.view(torch.int16), every.view(torch.int16))


def test_a_variance_follows_where_rounding_to_nearest_stands_still() -> None:
    """1,500 steps with beta2 = 0.999 of gradients that become ten times smaller after the first 500."""
    generator = torch.Generator().manual_seed(3)
    count = 4096
    m, v = torch.zeros(2, count).unbind()
    rounded_m, rounded_v = torch.zeros(2, count, dtype=torch.bfloat16).unbind()
    nearest = torch.zeros(count, dtype=torch.bfloat16)
    for step in range(1, 1501):
        scalars = adam_scalars(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=step, decoupled=True)
        grad = torch.randn(count, generator=generator) * (1.0 if step <= 500 else 0.1)
        adam(torch.zeros(count), None, m, v, grad, scalars)
        adam(torch.zeros(count), None, rounded_m, rounded_v, grad, scalars)
        nearest = (nearest.float() * scalars.beta2 + grad * grad * scalars.one_minus_beta2).bfloat16()
    ratio = rounded_v.float() / v
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.005)
    assert ratio.std().item() < 0.09
    assert (rounded_m.float() - m).abs().max() < 0.05 * m.std()
    assert (nearest.float() / v).mean().item() > 1.2, "rounding to nearest would do as well"


@pytest.mark.parametrize("step", [1, (1 << 24) - 1, 1 << 24, 1 << 40])
def test_two_steps_in_a_row_round_apart_however_many_there_were(step: int) -> None:
    """With the same random bits a variance that was rounded up to where it was would be so again."""
    m, v = (moment.bfloat16() for moment in _moments())
    errors = []
    for number in (step, step + 1):
        scalars = adam_scalars(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=number, decoupled=True)
        found = v.clone()
        adam(torch.zeros(COUNT), None, m.clone(), found, torch.zeros(COUNT), scalars)
        whole = v.float() * scalars.beta2
        errors.append(_away(whole, found) - _share(whole))
    assert abs(torch.corrcoef(torch.stack(errors))[0, 1].item()) < 5 / math.sqrt(COUNT)
