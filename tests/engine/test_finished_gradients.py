"""A step of several backwards against plain torch, which shares no code with the engine, its kernels or the plain loop.

The gradients are added in fp32 in order. The finished sum is rounded once to the type of the weights. Norm, clipping
and AdamW see nothing but that gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from protrain.engine.updates.host_updates import Window
from tests.engine import residual
from tests.engine.harness import FEW_PLANS, Batch, Loop, Trainer, check_equal_to_plain, default_loss
from tests.engine.test_streamed_updates import first_possible

STEPS = 3
LR, BETA1, BETA2, EPS, DECAY = 3e-3, 0.9, 0.95, 1e-8, 0.1
ROWS, LANES = 16, 1024  # of a tile of the norm
WIDTH = 136  # a matrix of the blocks has more elements than a tile


def make() -> nn.Module:
    return residual.make(width=WIDTH, depth=3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    dtype: torch.dtype
    backwards: int
    max_norm: float | None
    gain: float  # a factor on the loss
    skipped: int = 0  # steps

    def __str__(self) -> str:
        overflows = "-overflows" * (self.skipped > 0)
        return f"{self.dtype}-{self.backwards}-{self.max_norm}{overflows}".removeprefix("torch.")

    @property
    def loop(self) -> Loop:
        return Loop(
            max_norm=self.max_norm,
            accumulate=self.backwards,
            scheduler=False,
            loss=lambda model, batch: default_loss(model, batch) * self.gain,
        )


CASES = [  # every pair of type, number of backwards and clipping
    Case(torch.bfloat16, 2, None, gain=0.25),
    Case(torch.bfloat16, 3, 0.05, gain=0.25),
    Case(torch.float16, 2, 0.05, gain=0.25),
    Case(torch.float16, 3, None, gain=0.25),
]
# In one step the scaled gradients of either backward are finite in float16, and their sum is so only in fp32.
OVERFLOWS = [Case(torch.float16, 2, max_norm, gain=1.0, skipped=1) for max_norm in (None, 0.05)]


@dataclass
class Trained:
    """What came of it: each loss, each norm (or nothing), and weights and fp32 masters in the order of definition."""

    values: list[float]
    weights: list[Tensor]
    masters: list[Tensor]
    norms: list[float]
    skipped: int = 0


# -- the reference -----------------------------------------------------------------------------------------------------


def fp32(value: float) -> float:
    return float(numpy.float32(value))


def weight_of(master: Tensor, dtype: torch.dtype) -> Tensor:
    """bf16 weights are rounded to nearest with ties away from zero, fp16 ones to nearest even."""
    if dtype is torch.float16:
        return master.half()
    return (master.view(torch.int32) + 0x8000).bitwise_right_shift(16).to(torch.int16).view(torch.bfloat16)


def squares(gradient: Tensor) -> Tensor:
    """The sum of squares of each tile of a gradient in 16 bits."""
    flat = gradient.float().flatten()
    flat = nn.functional.pad(flat, (0, -len(flat) % (ROWS * LANES)))
    lanes = torch.zeros(len(flat) // (ROWS * LANES), LANES)
    for row in flat.view(-1, ROWS, LANES).unbind(1):
        lanes = lanes + row * row
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes.flatten()


def adamw_step(master: Tensor, m: Tensor, v: Tensor, g: Tensor, step: int) -> None:
    """AdamW in fp32. Double holds enough digits for a root and a quotient that are rounded to fp32 correctly."""
    m.copy_(m * fp32(BETA1) + g * fp32(1 - BETA1))
    v.copy_(v * fp32(BETA2) + (g * g) * fp32(1 - BETA2))
    root = v.double().sqrt().float()
    denominator = root * fp32(1 / math.sqrt(1 - BETA2**step)) + fp32(EPS)
    quotient = (m.double() / denominator.double()).float()
    master.copy_(master * fp32(1 - LR * DECAY) - quotient * fp32(LR / (1 - BETA1**step)))


@functools.cache
def reference(case: Case, *, rounds: bool = True) -> Trained:
    """``rounds``: whether the finished sum is rounded, as it has to be."""
    model = make()
    parameters = list(model.parameters())
    masters = [parameter.detach().clone() for parameter in parameters]
    moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in masters]
    for parameter, master in zip(parameters, masters, strict=True):
        parameter.data = weight_of(master, case.dtype)
    scale = 2.0**16 if case.dtype is torch.float16 else 1.0
    data = residual.batches(STEPS * case.backwards)
    values, norms, step, skipped = [], [], 0, 0
    torch.manual_seed(1)  # as the loop does, for dropout
    for first in range(0, len(data), case.backwards):
        sums: list[Tensor] = []
        for (x,) in data[first : first + case.backwards]:
            loss = model(x.to(case.dtype)).float().square().mean() * case.gain
            values.append(loss.item())
            gradients = torch.autograd.grad(loss * scale, parameters)
            if sums:
                sums = [total + gradient.float() for total, gradient in zip(sums, gradients, strict=True)]
            else:
                sums = [gradient.float() for gradient in gradients]
        finished = [total.to(case.dtype).float() if rounds else total for total in sums]
        norm = torch.cat([squares(gradient) for gradient in finished]).double().sum().sqrt().float() / scale
        factor = torch.tensor([1 / scale])
        if case.max_norm is not None:
            norms.append(norm.item())
            values.append(norm.item())
            factor = factor * torch.clamp(case.max_norm / (norm + 1e-6), max=1.0)
        if not norm.isfinite():
            scale /= 2
            skipped += 1
            continue
        step += 1
        for parameter, master, (m, v), gradient in zip(parameters, masters, moments, finished, strict=True):
            adamw_step(master, m, v, gradient * factor, step)
            parameter.data = weight_of(master, case.dtype)
    weights = [parameter.detach().clone() for parameter in parameters]
    return Trained([-1.0 if math.isnan(value) else value for value in values], weights, masters, norms, skipped)


# -- what is compared with it ------------------------------------------------------------------------------------------


def run(model: nn.Module, optimizer: Trainer, data: Sequence[Batch], *, case: Case) -> None:
    """Train by ``case``, to what the reference has."""
    expected = reference(case)
    assert case.loop.run(model, optimizer, data) == expected.values
    assert optimizer.skipped_steps == expected.skipped == case.skipped
    names = [name for name, _ in make().named_parameters()]
    weights = model.state_dict()
    for name, weight, master in zip(names, expected.weights, expected.masters, strict=True):
        found = weights[name].cpu()
        assert found.dtype is case.dtype
        assert found.view(torch.int16).equal(weight.view(torch.int16)), name
        assert optimizer.export_parameter(name)["master"].view(torch.int32).equal(master.view(torch.int32)), name


@pytest.mark.parametrize("case", CASES + OVERFLOWS, ids=str)
def test_rounding_matters_and_each_case_is_what_it_says(case: Case) -> None:
    expected, unrounded = reference(case), reference(case, rounds=False)
    assert any(not ours.equal(theirs) for ours, theirs in zip(expected.masters, unrounded.masters, strict=True))
    assert (expected.skipped, unrounded.skipped) == (case.skipped, 0)
    if case.max_norm is not None:
        assert expected.norms != unrounded.norms
        assert min(expected.norms) > case.max_norm, "a step is not clipped"
    moved = [not ours.equal(theirs) for ours, theirs in zip(expected.masters, make().parameters(), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("case", CASES + OVERFLOWS, ids=str)
def test_the_plain_loop_and_the_engine(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the host had begun speculative updates in time, and were late with all others.
    monkeypatch.setattr(Window, "is_closed", lambda _: False)
    monkeypatch.setattr("protrain.engine.updates.host_updates.next_for_gpu", first_possible)
    train, data = functools.partial(run, case=case), residual.batches(STEPS * case.backwards)
    how: dict[str, Any] = {"dtype": case.dtype, "optimizer": adamw, "accumulation": case.backwards}
    trained = check_equal_to_plain(make, data, run=train, **how)
    assert [optimizer.plan.n_device_sum > 0 for optimizer in trained] == [spec.sums for spec in FEW_PLANS]
    if case.max_norm is None:
        assert trained[0].report().speculative_updates > 0
