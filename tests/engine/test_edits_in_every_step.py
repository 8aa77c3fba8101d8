"""Loops that edit one weight, or single gradients, in every step, as CLIP and DINO do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    NONE,
    SWAP,
    Loop,
    Spec,
    Trainer,
    adamw,
    assert_same,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain
from tests.engine.residual import batches, make

SPECS = (
    Spec("all", "least", (NONE,)),
    Spec("some", "least", (CKPT, SWAP, NONE), speculate=True),
    Spec("none", "least", (CKPT_SWAP, NONE), small=True, speculate=True),
)
CLAMPED = "blocks.1.norm.weight"
LIMIT = 1.002  # a few steps of 3e-3 take some values beyond it


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_parameter_that_is_clamped_after_every_step(spec: Spec, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, *, alone: bool) -> list[float]:
        clamped, other = model.get_parameter(CLAMPED), model.get_parameter("leave.bias")
        losses = []
        for batch in batches(4):
            losses += Loop(scheduler=False).run(model, optimizer, [batch])
            with torch.no_grad(), protrain.full_parameters(clamped if alone else model):
                clamped.clamp_(max=LIMIT)
                if alone:
                    with pytest.raises(MisuseError, match=r"data of leave\.bias was .*one parameter in place of"):
                        other.zero_()
        return losses

    found = []
    for alone in (True, False):
        inner = make()
        model, optimizer = wrap_under(spec, inner, adamw(inner), batches(1)[0], device=device)
        found.append((run(model, optimizer, alone=alone), states(model, optimizer)))
        values = model.state_dict()[CLAMPED]
        assert values.max() == torch.tensor(LIMIT, dtype=values.dtype)
        assert values.min() < 1.0
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


def _clip(parameter: Tensor) -> None:
    """Clip one gradient by its own norm."""
    assert parameter.grad is not None
    norm = parameter.grad.norm()
    if norm > 1e-3:
        parameter.grad.mul_(1e-3 / norm)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_that_are_clipped_one_by_one(spec: Spec, device: torch.device) -> None:
    """What the error for a part of the gradients advises."""
    inner, again = make(), make()
    model, optimizer = wrap_under(spec, inner, adamw(inner), batches(1)[0], device=device, dtype=torch.bfloat16)
    default_loss(model, batches(1)[0]).backward()
    torch.nn.utils.clip_grad_norm_([model.get_parameter("leave.weight")], 1e-3)
    with pytest.raises(MisuseError, match=r"multiplies all or none.*register_post_accumulate_grad_hook"):
        optimizer.step()
    optimizer.zero_grad()
    for parameter in (*model.parameters(), *again.parameters()):
        parameter.register_post_accumulate_grad_hook(_clip)
    plain, its_optimizer = prepare_plain(again, adamw(again), device=device, dtype=torch.bfloat16)
    assert Loop().run(model, optimizer, batches(4)) == Loop().run(plain, its_optimizer, batches(4))
    assert_same(states(model, optimizer), states(plain, its_optimizer))
