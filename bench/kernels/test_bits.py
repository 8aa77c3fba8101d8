"""The Triton kernel, the C kernel and the torch reference of AdamW give the same bits, whatever bits they are given.

Weights, moments and gradients are random bit patterns: subnormal, huge and tiny values, zeros of both signs, infinities
and NaN (any NaN equals any other: machines choose its payload). In half of the places none is 2 or more: the host's
kernel takes another way through blocks without infinities and NaN, and of random bits there would be no such block.
Gradients are of the weight's type, or sums in fp32, which are multiplied and rounded to it first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.kernels.adam_states import States
from bench.kernels.peers import same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import NO_ROOF
from bench.kernels.rows import OURS
from protrain_kernels import AdamScalars, adam, adam_reference, adam_scalars, padded
from protrain_kernels.adam import launch_adam

# NumPy, under Triton's interpreter, remarks on the infinities and NaN that this is about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

ELEMENTS = {"cuda": 1_000_000_000, "cpu": 1_000_064}
_PIECE = 1 << 26  # elements at a time
# A weight decay and a step for each optimizer: AdamW at the 10th step, Adam's decay in the gradient at the first.
STEPS = {
    "AdamW": adam_scalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10, decoupled=True),
    "Adam": adam_scalars(lr=3e-2, beta1=0.9, beta2=0.999, eps=1e-12, weight_decay=0.01, step=1, decoupled=False),
}


def _any_bits(elements: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
    drawn = torch.randint(low, high + 1, (elements,), generator=generator, device=generator.device, dtype=torch.int64)
    if dtype.is_floating_point:
        drawn[: elements // 2] &= ~(1 << 8 * dtype.itemsize - 2)  # the highest bit of the exponent
    return drawn.to(integers).view(dtype)


def _random_bits(
    elements: int,
    dtype: torch.dtype,
    moment_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    generator: torch.Generator,
) -> States:
    master = None if dtype == torch.float32 else _any_bits(elements, torch.float32, generator)
    if dtype == torch.bfloat16:
        master = _any_bits(elements, torch.int16, generator)
    return States(
        _any_bits(elements, dtype, generator),
        master,
        _any_bits(elements, moment_dtype, generator),
        _any_bits(elements, moment_dtype, generator).abs_(),
        _any_bits(elements, grad_dtype, generator),
    )


@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16], ids=["fp32-moments", "bf16-moments"])
@pytest.mark.parametrize("optimizer", STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_bits(recorder: Recorder, dtype: torch.dtype, optimizer: str, moment_dtype: torch.dtype) -> None:
    elements = ELEMENTS[recorder.device.type]
    if (dtype, optimizer, moment_dtype) != (torch.bfloat16, "AdamW", torch.float32):
        elements = padded(elements // 10)  # the one of training in full, the others in part
    operator = f"{optimizer}, any bits{', bf16 moments' * (moment_dtype is torch.bfloat16)}"

    def draw(count: int, generator: torch.Generator) -> States:
        return _random_bits(count, dtype, moment_dtype, dtype, generator)

    _measure(recorder, operator, elements, dtype, draw, STEPS[optimizer])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_bits_of_sums(recorder: Recorder, dtype: torch.dtype) -> None:
    elements = padded(ELEMENTS[recorder.device.type] // 10)

    def draw(count: int, generator: torch.Generator) -> States:
        return _random_bits(count, dtype, torch.float32, torch.float32, generator)

    _measure(recorder, "AdamW, any bits, fp32 sums", elements, dtype, draw, STEPS["AdamW"], gradient_factor=1 / 3)


def _measure(
    recorder: Recorder,
    operator: str,
    elements: int,
    dtype: torch.dtype,
    draw: Callable[[int, torch.Generator], States],
    scalars: AdamScalars,
    gradient_factor: float = 1.0,
) -> None:
    def check() -> str:
        for seed, first in enumerate(range(0, elements, _PIECE)):
            generator = torch.Generator(recorder.device).manual_seed(seed)
            _check_piece(draw(min(_PIECE, elements - first), generator), scalars, gradient_factor)
        return f"bits equal: Triton, C and torch on {elements:,} random bit patterns"

    recorder.measure(
        operator=operator,
        shape=f"{elements:,} elements",
        dtype=str(dtype).removeprefix("torch."),
        implementation=OURS,
        roof=NO_ROOF,
        bytes_moved=0,
        run=None,
        check=check,
    )


def _check_piece(states: States, scalars: AdamScalars, gradient_factor: float) -> None:
    whole = slice(0, states.weight.numel())
    by_triton, by_c, by_torch = states.part(whole), states.to(torch.device("cpu")), states
    launch_adam(*by_triton.tensors, scalars, gradient_factor=gradient_factor)
    adam(*by_c.tensors, scalars, gradient_factor=gradient_factor)
    adam_reference(*by_torch.tensors, scalars, gradient_factor=gradient_factor)
    for side, found in (("Triton", by_triton), ("C", by_c.to(states.weight.device))):
        for name in ("weight", "master", "exp_avg", "exp_avg_sq"):
            wanted = getattr(by_torch, name)
            if wanted is not None:
                same_bits(f"{name} of {side}", getattr(found, name), wanted)
