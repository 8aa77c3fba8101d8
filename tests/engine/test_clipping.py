"""Clipping holds for the gradients that it was asked for: no others join them, and nothing else undoes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from tests.engine.harness import (
    CKPT,
    FEW_PLANS,
    NONE,
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


def test_gradients_of_inputs_leave_the_clipping_of_a_step_as_it_is(device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer) -> dict[str, Tensor]:
        torch.manual_seed(1)
        for batch in batches(4):
            default_loss(model, batch).backward()
            assert optimizer.clip_grad_norm_(0.01) > 0.01
            x = batch[0].to(device).requires_grad_()
            torch.autograd.grad(model(x).float().sum(), [x])
            optimizer.step()
            optimizer.zero_grad()
        return states(model, optimizer)

    plain = make()
    expected = run(*prepare_plain(plain, adamw(plain), device=device, dtype=torch.bfloat16))
    for spec in FEW_PLANS:
        model = make()
        wrapped = wrap_under(spec, model, adamw(model), batches()[0], device=device, dtype=torch.bfloat16)
        assert_same(run(*wrapped), expected)


@pytest.mark.parametrize("only_accumulates", [False, True])
@pytest.mark.parametrize(
    "spec", [Spec("all", "least", (NONE,)), Spec("none", "least", (CKPT,), speculate=True)], ids=str
)
def test_gradients_after_clipping_are_refused(spec: Spec, only_accumulates: bool, device: torch.device) -> None:
    found = []
    for misused in (False, True):
        model = make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device)
        torch.manual_seed(1)
        default_loss(wrapped, batches()[0]).backward()
        optimizer.clip_grad_norm_(0.01)
        if misused:
            with optimizer.accumulating() if only_accumulates else torch.enable_grad():
                loss = default_loss(wrapped, batches()[1])
                with pytest.raises(MisuseError, match=r"clip once, after the last backward\(\)"):
                    loss.backward()
        optimizer.zero_grad()
        torch.manual_seed(2)
        default_loss(wrapped, batches()[2]).backward()
        optimizer.step()
        found.append(states(wrapped, optimizer))
    assert_same(found[1], found[0])


def test_clipping_in_inference_mode_is_the_same(device: torch.device) -> None:
    """In one step and not in the next, where gradients are summed in host memory."""

    def run(*modes: bool) -> dict[str, Tensor]:
        model = make()
        spec = Spec("none", "least", (CKPT,))
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device, accumulation=2)
        torch.manual_seed(1)
        for mode in modes:
            for batch in batches(2):
                default_loss(wrapped, batch).backward()
            with torch.inference_mode(mode):
                optimizer.clip_grad_norm_(0.01)
            optimizer.step()
            optimizer.zero_grad()
        return states(wrapped, optimizer)

    assert_same(run(True, False, True), run(False, False, False))
