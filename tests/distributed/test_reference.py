"""Several ranks against plain torch that shares no code with the engine, its kernels or the plain loop.

The reference adds the gradients of all micro-batches from left to right in fp32 and rounds the sum once. Its norm,
clipping and AdamW are its own (``tests.engine.test_finished_gradients``).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import on_ranks
from tests.engine import residual
from tests.engine.harness import CKPT, NONE, SWAP, Spec, default_loss, wrap_under
from tests.engine.test_finished_gradients import STEPS, WIDTH, Case, adamw, reference

SPECS = (Spec("all", "all", (NONE,)), Spec("some", "least", (CKPT, SWAP), small=True), Spec("none", "least", (CKPT,)))


def make() -> nn.Module:
    """A model without dropout, whose matrices have more elements than a tile of the norm."""
    model = residual.make(width=WIDTH, depth=3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def train(rank: int, case: Case, size: int, spec: Spec) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses and norms on one of ``size`` ranks, and the weights and masters that come of it."""
    model = make()
    accumulation = case.backwards // size
    data = residual.batches(STEPS * case.backwards)
    wrapped, optimizer = wrap_under(
        spec,
        model,
        adamw(model),
        data[0],
        device=torch.device("cpu"),
        dtype=case.dtype,
        world_size=size,
        accumulation=accumulation,
        gradient_reduction="sum",
    )
    values = []
    for first in range(0, len(data), case.backwards):
        for batch in data[first + rank : first + case.backwards : size]:
            loss = default_loss(wrapped, batch) * case.gain
            optimizer.backward(loss)
            values.append(loss.item())
        if case.max_norm is not None:
            values.append(float(optimizer.clip_grad_norm_(case.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in make().named_parameters()]
    weights = wrapped.state_dict()
    masters = [optimizer.export_parameter(name)["master"] for name in names]
    assert optimizer.skipped_steps == case.skipped
    return [-1.0 if math.isnan(value) else value for value in values], [weights[name] for name in names], masters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size", "specs"),
    [
        (Case(torch.bfloat16, 2, 0.05, gain=0.25), 2, SPECS),
        (Case(torch.float16, 3, 0.05, gain=0.25), 3, SPECS[:1]),
        (Case(torch.float16, 2, 0.05, gain=1.0, skipped=1), 2, SPECS[2:]),
    ],
    ids=lambda value: "+".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_the_bits_of_plain_torch(case: Case, size: int, specs: tuple[Spec, ...]) -> None:
    expected = reference(case, made=make)
    assert expected.skipped == case.skipped
    assert reference(case, rounds=False, made=make).masters[0].ne(expected.masters[0]).any(), "the case is too easy"
    per_step = case.backwards + (case.max_norm is not None)
    for spec in specs:
        for rank, (values, weights, masters) in enumerate(on_ranks(size, train, case, size, spec)):
            mine = []
            for first in range(0, len(expected.values), per_step):
                losses, norm = (
                    expected.values[first:][: case.backwards],
                    expected.values[first:][case.backwards : per_step],
                )
                mine += [*losses[rank::size], *norm]
            assert values == mine, (rank, str(spec))
            for index, weight in enumerate(expected.weights):
                assert weights[index].view(torch.int16).equal(weight.view(torch.int16)), (rank, str(spec), index)
                assert masters[index].view(torch.int32).equal(expected.masters[index].view(torch.int32)), index
