"""A sum of gradients in fp32 is multiplied and rounded once, by whoever reads it, as torch's casts round.

What is expected is always made from the gradient of 16 bits that torch itself makes of the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protrain_kernels import (
    MASTER_DTYPES,
    TILE,
    AdamStaging,
    adam,
    adam_reference,
    adam_scalars,
    flatten,
    padded,
    streamed_adam,
    sum_of_squares_reference,
)
from tests.kernels.states import check, copied, random_states

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
FACTORS = [1.0, 0.25, 1 / 3]  # the last is no fp32 number
MOMENTS = pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16], ids=["moments", "bfloat16-moments"])
SCALARS = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, decoupled=False)
COUNT = 2048 + 384
# NumPy, under Triton's interpreter, remarks on the infinities and NaN that some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SameBits = Callable[..., None]


def _sums(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


def _torchs(sums: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The gradient of ``dtype`` that torch makes of ``sums``."""
    gradient = (sums * torch.full_like(sums, factor)).to(dtype)
    if dtype is not torch.float32:
        assert (gradient.float() != sums * factor).float().mean() > 0.9, "hardly a sum was rounded"
    return gradient


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("factor", FACTORS)
@MOMENTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_update_with_a_sum_is_that_with_torchs_rounded_gradient(
    backend: Any, same_bits: SameBits, dtype: torch.dtype, moment_dtype: torch.dtype, factor: float, scaled: bool
) -> None:
    states, sums = random_states(COUNT, dtype, moment_dtype), _sums(COUNT)
    scale = torch.tensor([0.3]) if scaled else None
    expected, found, referred = copied(states), copied(states, backend.device), copied(states)
    adam_reference(*expected, _torchs(sums, dtype, factor), SCALARS, scale=scale)
    here = None if scale is None else scale.to(backend.device)
    backend.adam(*found, sums.to(backend.device), scalars=SCALARS, gradient_factor=factor, scale=here)
    check(found, expected, same_bits)
    adam_reference(*referred, sums, SCALARS, gradient_factor=factor, scale=scale)
    check(referred, expected, same_bits)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_rounding_boundary_is_on_the_side_where_torch_has_it(
    backend: Any, same_bits: SameBits, any_bits: Callable[[int, int], torch.Tensor], dtype: torch.dtype
) -> None:
    """Without momentum and decay the new momentum is the finished gradient itself."""
    halves = torch.arange(0, 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    middles = (halves[:-1] + halves[1:]) / 2
    middles[::2] *= -1
    bits = middles.view(torch.int32)
    nudged = [(bits + step).view(torch.float32) for step in (-1, 0, 1)]
    largest = torch.tensor([65519.996, 65520.0, 3.3961773e38, 3.3961775e38])  # the last that are finite, and beyond
    sums = torch.cat([*nudged, largest, -largest, any_bits(3, 1 << 12)])
    sums = torch.nn.functional.pad(sums, (0, padded(sums.numel()) - sums.numel()))
    scalars = adam_scalars(lr=1e-2, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)
    weight = torch.zeros_like(sums, dtype=dtype)
    master = torch.zeros_like(sums, dtype=MASTER_DTYPES[dtype])
    moved = [state.to(backend.device) for state in (weight, master, torch.zeros_like(sums), torch.zeros_like(sums))]
    backend.adam(*moved, sums.to(backend.device), scalars=scalars)
    expected = sums.to(dtype).float() + 0.0  # the momentum was 0, to which -0 is added
    same_bits(moved[2], expected)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_flatten_keeps_the_sum_whole_and_rounds_it_for_the_squares(
    backend: Any, same_bits: SameBits, dtype: torch.dtype, shift: int
) -> None:
    count = 2 * TILE + 77
    generator = torch.Generator().manual_seed(4)
    first, second, third = (torch.randn(count + shift, generator=generator).to(dtype) for _ in range(3))
    chunk = torch.full((padded(count),), torch.nan, device=backend.device)
    partials = torch.full((3,), torch.nan, device=backend.device)
    total = torch.zeros(count)
    for index, gradient in enumerate((first, second, third)):
        here = gradient.to(backend.device)[shift:]
        backend.flatten([here], chunk, [0], partials, [0], accumulate=index > 0, weight_dtype=dtype)
        total = total + gradient[shift:].float() if index else gradient[shift:].float()
        same_bits(chunk[:count], total)
        same_bits(partials, sum_of_squares_reference(total.to(dtype)))
    assert not torch.equal(partials.cpu(), sum_of_squares_reference(total)), "rounding makes no difference"


def test_only_sums_in_fp32_are_multiplied() -> None:
    states, gradient = random_states(COUNT, torch.bfloat16), torch.zeros(COUNT, dtype=torch.bfloat16)
    staging = AdamStaging(torch.device("cpu"), size_bytes=1 << 20)
    for step, others in ((adam, ()), (streamed_adam, (staging,))):
        with pytest.raises(ValueError, match=r"gradient_factor is 0\.5, and a torch\.bfloat16 gradient is finished"):
            step(*states, gradient, SCALARS, *others, gradient_factor=0.5)
    with pytest.raises(ValueError, match=r"weight_dtype must be one of .*, not torch\.int16"):
        flatten([torch.zeros(9)], torch.zeros(128), [0], weight_dtype=torch.int16)
