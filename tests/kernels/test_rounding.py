"""A sum of gradients in fp32 is multiplied and rounded once, by whoever reads it, and squares are summed in one order.

What is expected is always made from the gradient of 16 bits that torch itself makes of the sum.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from protrain_kernels import (
    MASTER_DTYPES,
    TILE,
    AdamStates,
    Slice,
    adam,
    adam_reference,
    adam_scalars,
    flatten,
    fold,
    join,
    padded,
    split,
    sum_of_squares_reference,
    tiles,
)
from protrain_kernels.host_kernels import sum_of_squares
from tests.kernels.states import (
    BF16,
    FP16,
    FP32,
    MOMENTS,
    TYPES,
    any_bits,
    boundaries,
    check,
    copied,
    random_states,
    same_bits,
)

HALVES = [BF16, FP16]
FACTORS = [1.0, 0.25, 1 / 3]  # the last is no fp32 number
SCALARS = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, decoupled=False)
COUNT = 2048 + 384


def _sums(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


def _torchs(sums: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The gradient of ``dtype`` that torch makes of ``sums``."""
    gradient = (sums * torch.full_like(sums, factor)).to(dtype)
    if dtype is not FP32:
        assert (gradient.float() != sums * factor).float().mean() > 0.9, "hardly a sum was rounded"
    return gradient


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("factor", FACTORS)
@MOMENTS
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_update_with_a_sum_is_that_with_torchs_rounded_gradient(
    backend: Any, dtype: torch.dtype, moment_dtype: torch.dtype, factor: float, scaled: bool
) -> None:
    states, sums = random_states(COUNT, dtype, moment_dtype), _sums(COUNT)
    scale = torch.tensor([0.3]) if scaled else None
    expected, found, referred = copied(states), copied(states, backend.device), copied(states)
    adam_reference(*expected, _torchs(sums, dtype, factor), SCALARS, scale=scale)
    here = None if scale is None else scale.to(backend.device)
    adam(*found, sums.to(backend.device), scalars=SCALARS, gradient_factor=factor, scale=here)
    check(found, expected)
    adam_reference(*referred, sums, SCALARS, gradient_factor=factor, scale=scale)
    check(referred, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_rounding_boundary_is_on_the_side_where_torch_has_it(backend: Any, dtype: torch.dtype) -> None:
    """Without momentum and decay the new momentum is the finished gradient itself."""
    nudged = boundaries(dtype)
    nudged[::2] *= -1
    largest = torch.tensor([65519.996, 65520.0, 3.3961773e38, 3.3961775e38])  # the last that are finite, and beyond
    sums = torch.cat([nudged, largest, -largest, any_bits(3, 1 << 12)])
    sums = torch.nn.functional.pad(sums, (0, padded(sums.numel()) - sums.numel()))
    scalars = adam_scalars(lr=1e-2, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)
    weight = torch.zeros_like(sums, dtype=dtype)
    master = torch.zeros_like(sums, dtype=MASTER_DTYPES[dtype])
    states = copied(AdamStates(weight, master, torch.zeros_like(sums), torch.zeros_like(sums)), backend.device)
    adam(*states, sums.to(backend.device), scalars)
    same_bits(states.exp_avg, sums.to(dtype).float() + 0.0)  # the momentum was 0, to which -0 is added


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_flatten_keeps_the_sum_whole_and_rounds_it_for_the_squares(
    backend: Any, dtype: torch.dtype, shift: int
) -> None:
    count = 2 * TILE + 77
    generator = torch.Generator().manual_seed(4)
    first, second, third = (torch.randn(count + shift, generator=generator).to(dtype) for _ in range(3))
    chunk = torch.full((padded(count),), torch.nan, device=backend.device)
    partials = torch.full((3,), torch.nan, device=backend.device)
    total = torch.zeros(count)
    for index, gradient in enumerate((first, second, third)):
        here = gradient.to(backend.device)[shift:]
        flatten([here], chunk, [0], partials, [0], accumulate=index > 0, weight_dtype=dtype)
        total = total + gradient[shift:].float() if index else gradient[shift:].float()
        same_bits(chunk[:count], total)
        same_bits(partials, sum_of_squares_reference(total.to(dtype)))
    assert not torch.equal(partials.cpu(), sum_of_squares_reference(total)), "rounding makes no difference"


def _flattened(values: torch.Tensor) -> torch.Tensor:
    """The partials that ``flatten`` writes of values that it leaves in their place."""
    chunk = values.new_zeros(padded(values.numel()))
    chunk[: values.numel()] = values
    before, partials = chunk.clone(), torch.full((tiles(values.numel()),), torch.nan, device=values.device)
    flatten([chunk[: values.numel()]], chunk, [0], partials, [0])
    same_bits(chunk, before)
    return partials


COUNTS = [1, 127, 1024, 1025, TILE - 1, TILE, TILE + 1, 2 * TILE + 5000]


def _values(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    spread = torch.randn(count, generator=generator)
    return (spread * torch.rand(count, generator=generator).exp2() * 3).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_partial_sums_have_the_bits_of_the_reference(backend: Any, count: int, dtype: torch.dtype) -> None:
    values = _values(count, dtype)
    same_bits(_flattened(values.to(backend.device)), sum_of_squares_reference(values))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, compiled: None, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    values = _values(5 * TILE + 77, BF16)
    same_bits(sum_of_squares(values), sum_of_squares_reference(values))


def test_the_reference_follows_the_stated_order() -> None:
    values = _values(TILE + 1500, FP32)
    whole = numpy.zeros(2 * TILE, dtype=numpy.float32)
    whole[: values.numel()] = values.numpy()
    expected = []
    for tile in whole.reshape(2, 16, 1024):
        lanes = [numpy.float32(0)] * 1024
        for row in tile:
            lanes = [numpy.float32(lane + numpy.float32(x * x)) for lane, x in zip(lanes, row, strict=True)]
        width = 512
        while width:
            lanes = [numpy.float32(lanes[i] + lanes[i + width]) for i in range(width)]
            width //= 2
        expected.append(lanes[0])
    assert sum_of_squares_reference(values).tolist() == [float(partial) for partial in expected]


def test_subnormal_squares_survive(backend: Any) -> None:
    values = torch.full((TILE,), 3e-21)  # squares to 9e-42, below the smallest normal fp32
    assert _flattened(values.to(backend.device)).item() > 0


@pytest.mark.parametrize("how", ["flatten", "fold"])
@pytest.mark.parametrize(
    ("dtype", "place", "bad"),
    [(FP32, 0, torch.inf), (BF16, 5000, torch.nan), (BF16, TILE, -torch.inf), (FP32, 2 * TILE + 6, torch.nan)],
)
def test_a_value_that_is_not_finite_shows_in_its_partial(
    backend: Any, how: str, dtype: torch.dtype, place: int, bad: float
) -> None:
    numel = 2 * TILE + 7
    values = torch.ones(padded(numel), dtype=dtype)
    values[place] = bad
    chunk, partials = torch.zeros_like(values, device=backend.device), torch.zeros(3, device=backend.device)
    if how == "flatten":
        flatten([values[:numel].to(backend.device)], chunk, [0], partials, [0])
    else:
        whole = Slice(offset=0, numel=numel, first=0, parameter_numel=numel, partial_offset=0)
        pieces = torch.stack([torch.ones_like(values), values]).to(backend.device)
        fold(pieces, [whole], gradient=chunk, partials=partials, factor=1.0)
    assert partials.isfinite().tolist() == [tile != place // TILE for tile in range(3)]


# -- split and join ----------------------------------------------------------------------------------------------------


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
