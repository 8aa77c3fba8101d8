"""Adam gives the same bits from C, from separate torch operations and from Triton, and AdamW's result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from protrain_kernels import AdamScalars, AdamStates, adam, adam_reference, adam_scalars, host_kernels, split
from tests.kernels.states import MOMENTS, any_bits, check, copied, random_states, same_bits, states_of

COUNT = 2048 + 384  # two whole blocks of the Triton kernel and a part
TYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
]
IDS = [f"{weight}-{grad}".replace("torch.", "") for weight, grad in TYPES]


def _scalars(step: int, **changes: Any) -> AdamScalars:
    chosen = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True} | changes
    return adam_scalars(step=step, **chosen)


@pytest.mark.parametrize(
    ("decoupled", "eps", "scaled"), [(True, 0.0, False), (False, 1e-8, True)], ids=["adamw-plain", "adam-scaled"]
)
@MOMENTS
@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), TYPES, ids=IDS)
def test_any_bit_patterns_have_the_bits_of_the_reference(
    backend: Any,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    moment_dtype: torch.dtype,
    decoupled: bool,
    eps: float,
    scaled: bool,
) -> None:
    count = 1 << (22 if backend.device.type == "cuda" else 13)
    # Rolled, so that the special values at the start of each meet ordinary ones.
    values, exp_avg = any_bits(1, count), any_bits(2, count).roll(100)
    exp_avg_sq, grad = any_bits(3, count).roll(200).abs(), any_bits(4, count).roll(300)
    # A quarter of the elements have small values, so that results fall among the subnormals too.
    exp_avg[::4] *= 1e-30
    exp_avg_sq[::4] *= 1e-30
    grad[::4] *= 1e-30
    expected = states_of(values, exp_avg, exp_avg_sq, weight_dtype, moment_dtype)
    before, found = copied(expected), copied(expected, backend.device)
    scalars = _scalars(2, eps=eps, decoupled=decoupled)
    gradient, scale = grad.to(grad_dtype), torch.tensor([0.3]) if scaled else None
    adam_reference(*expected, gradient, scalars, scale=scale)
    here = None if scale is None else scale.to(backend.device)
    adam(*found, gradient.to(backend.device), scalars=scalars, scale=here)
    check(found, expected)
    assert (found.weight.cpu() != before.weight).float().mean() > 0.2, "hardly a weight moved"


def test_the_reference_rounds_every_operation_once() -> None:
    """Against exact rational arithmetic, rounded to fp32 after every operation by Python alone."""
    from fractions import Fraction

    def rounded(value: Fraction) -> Fraction:
        if value == 0:
            return value
        exponent = max(_floor_log2(abs(value)), -126)
        unit = Fraction(2) ** (exponent - 23)
        return round(value / unit) * unit  # Python rounds ties to even

    def root(value: Fraction) -> Fraction:
        if value == 0:
            return value
        shift = Fraction(4) ** 200
        return rounded(Fraction(math.isqrt(int(value * shift * shift)), 4**200))

    scalars = _scalars(3, decoupled=False)
    generator = torch.Generator().manual_seed(5)
    values, exp_avg, exp_avg_sq, grad = (torch.randn(64, generator=generator) for _ in range(4))
    exp_avg_sq = exp_avg_sq.square()
    weight, m, v = values.clone(), exp_avg.clone(), exp_avg_sq.clone()
    adam_reference(weight, None, m, v, grad, scalars, scale=torch.tensor([0.7]))
    s = {name: Fraction(value) for name, value in scalars._asdict().items()}
    scale = Fraction(torch.tensor(0.7).item())
    for i in range(64):
        p, g = Fraction(values[i].item()), rounded(Fraction(grad[i].item()) * scale)
        g = rounded(g + rounded(p * s["l2"]))
        p = rounded(p * s["decay"])
        momentum = rounded(rounded(Fraction(exp_avg[i].item()) * s["beta1"]) + rounded(g * s["one_minus_beta1"]))
        variance = rounded(
            rounded(Fraction(exp_avg_sq[i].item()) * s["beta2"]) + rounded(rounded(g * g) * s["one_minus_beta2"])
        )
        denominator = rounded(rounded(root(variance) * s["inv_sqrt_bias_correction2"]) + s["eps"])
        p = rounded(p - rounded(rounded(momentum / denominator) * s["step_size"]))
        assert (Fraction(weight[i].item()), Fraction(m[i].item()), Fraction(v[i].item())) == (p, momentum, variance)


def _floor_log2(value: Any) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if 2**exponent <= value else exponent - 1


def test_scalars_are_doubles_rounded_once() -> None:
    scalars = _scalars(7, lr=3e-4, weight_decay=0.01)
    single = {
        name: torch.tensor(value, dtype=torch.float64).float().double().item()
        for name, value in scalars._asdict().items()
    }
    assert scalars._asdict() == single
    assert scalars.decay == torch.tensor(1 - 3e-4 * 0.01, dtype=torch.float64).float().item()
    assert scalars.one_minus_beta1 == torch.tensor(1 - 0.9, dtype=torch.float64).float().item()
    assert scalars.step_size == torch.tensor(3e-4 / (1 - 0.9**7), dtype=torch.float64).float().item()
    assert scalars.inv_sqrt_bias_correction2 == torch.tensor((1 - 0.95**7) ** -0.5, dtype=torch.float64).float().item()
    assert _scalars(1 << 31).step == 0.0
    coupled = _scalars(7, decoupled=False)
    assert (coupled.decay, coupled.l2) == (1.0, torch.tensor(0.1).item())


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_difference_from_torch_optim_is_rounding_only(decoupled: bool) -> None:
    """After 100 steps of 1e-3 no weight is more than 2e-6 from torch.optim's, 50,000 times less than it can have moved.

    The bulk agrees better: the mean difference is below 2e-8, a quarter of an fp32 ulp at 1.
    """
    generator = torch.Generator().manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(COUNT, generator=generator))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    weight, exp_avg, exp_avg_sq = parameter.detach().clone(), torch.zeros(COUNT), torch.zeros(COUNT)
    start = weight.clone()
    for step in range(1, 101):
        grad = torch.randn(COUNT, generator=generator) + 0.5
        parameter.grad = grad.clone()
        optimizer.step()
        adam(weight, None, exp_avg, exp_avg_sq, grad, _scalars(step, decoupled=decoupled))
    difference = (weight - parameter.detach()).abs()
    assert (weight - start).abs().max() > 0.05
    assert difference.max() < 2e-6
    assert difference.mean() < 2e-8


def test_slices_of_an_arena_leave_their_neighbours_alone(backend: Any) -> None:
    arena = {name: torch.full((4 * 128,), torch.nan, device=backend.device) for name in ("w", "m", "v", "g")}
    middle = slice(128, 384)
    for tensor in arena.values():
        tensor[middle] = 0.5
    parts = {name: tensor[middle] for name, tensor in arena.items()}
    adam(parts["w"], None, parts["m"], parts["v"], parts["g"], scalars=_scalars(1))
    for tensor in arena.values():
        assert tensor[:128].isnan().all()
        assert tensor[384:].isnan().all()
        assert tensor[middle].isfinite().all()


def _shifted(states: AdamStates, start: int) -> AdamStates:
    """Zeros in the shapes of ``states``, which begin ``start`` elements into their storage."""
    moved: Any = [None if tensor is None else tensor.new_zeros(start + tensor.numel())[start:] for tensor in states]
    return AdamStates(*moved)


@pytest.mark.parametrize("how", ["c", "aten"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@MOMENTS
@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), TYPES, ids=IDS)
def test_into_a_second_copy_the_bits_are_those_in_place(
    monkeypatch: pytest.MonkeyPatch,
    compiled: None,
    weight_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    moment_dtype: torch.dtype,
    decoupled: bool,
    how: str,
) -> None:
    if how == "aten":
        monkeypatch.setattr(host_kernels, "library", lambda: None)
    scalars = _scalars(3, decoupled=decoupled)
    how_finished: dict[str, Any] = {"scale": torch.tensor([0.37]), "threads": 2}
    if grad_dtype is torch.float32:
        how_finished["gradient_factor"] = 1 / 3
    # Less than a block, one, one and a part, several runs of them.
    for count, start in ((128, 0), (512, 128), (640, 0), (128 * 781, 128)):
        old = random_states(count, weight_dtype, moment_dtype)
        expected, before, new = copied(old), copied(old), _shifted(old, start)
        grad = torch.randn(count).to(grad_dtype)
        adam(*expected, grad, scalars, **how_finished)
        adam(*old, grad, scalars, **how_finished, out=new)
        weight = _shifted(old, start).weight
        adam(*old, grad, scalars, **how_finished, out=weight)
        same_bits(weight, expected.weight)
        check(new, expected)
        check(old, before)


_INF, _NAN, _LARGE = float("inf"), float("nan"), 3.39e38  # the last is the largest bf16
_SPECIAL = [
    *(("grad", value) for value in (_NAN, _INF, -_INF, _LARGE, 3e19, -3e19)),
    *(("weight", value) for value in (_NAN, _INF, -_INF, _LARGE)),
    *(("exp_avg", value) for value in (_NAN, _INF, -_INF, _LARGE, -_LARGE)),
    *(("exp_avg_sq", value) for value in (_NAN, _INF, _LARGE, -1.0, -0.0)),
    *[("overflow", _LARGE)] * 4,  # variances that must be rounded down: beyond the largest bf16 is infinity
]


@pytest.mark.parametrize("out_of_place", [False, True], ids=["in place", "out of place"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_one_special_value_among_ordinary_ones(compiled: None, decoupled: bool, out_of_place: bool) -> None:
    """Moments in bf16: blocks without any, here every second one, go another way, with neighbours in pairs."""
    block = 512
    count = 4 * block * len(_SPECIAL)
    generator = torch.Generator().manual_seed(5)
    scalars = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.5, eps=1e-8, weight_decay=0.1, step=3, decoupled=decoupled)
    weight, remainder = split(torch.randn(count, generator=generator))
    exp_avg, grad = (torch.randn(count, generator=generator).bfloat16() for _ in range(2))
    exp_avg_sq = torch.rand(count, generator=generator).bfloat16()
    changed = {"grad": grad, "weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    scale = torch.tensor([1.0039])
    for at, (name, value) in enumerate(_SPECIAL):
        for side in range(2):  # of a pair
            place = 2 * (2 * at + side) * block + 17 + side
            if name == "overflow":
                exp_avg_sq[place], grad[place] = value, 1.8375e19  # its square, scaled, is just finite
                exp_avg[place] = 1e15 * place  # for other random bits
            else:
                changed[name][place] = value
    old = AdamStates(weight, remainder, exp_avg, exp_avg_sq)
    expected, found = copied(old), copied(old)
    adam_reference(*expected, grad, scalars, scale=scale)
    if out_of_place:
        adam(*old, grad, scalars, scale=scale, threads=2, out=found)
    else:
        adam(*found, grad, scalars, scale=scale, threads=2)
    check(found, expected)
