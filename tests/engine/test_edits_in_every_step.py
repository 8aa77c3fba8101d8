"""Loops that edit one weight in every step, as CLIP does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
    states,
    wrap_under,
)
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
