"""Managed parameters whose flags are changed, or whose values are edited, after wrapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.errors import MisuseError
from protrain.optim import ProTrainOptimizer
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

RESIDENT = Spec("all", "least", (NONE,))
SPECS = (
    RESIDENT,
    Spec("some", "least", (CKPT, SWAP, NONE), early=True),
    Spec("none", "least", (CKPT_SWAP, NONE), small=True, early=True),
)


@pytest.mark.parametrize("inside", [False, True], ids=["step", "step-during-backward"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_freezing_for_some_steps_has_the_plain_loops_bits(spec: Spec, inside: bool, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer) -> list[float]:
        loop, parts = Loop(), [model.get_submodule(name) for name in ("enter", "blocks.0", "blocks.2.norm")]
        losses = loop.run(model, optimizer, data[:2])
        for part in parts:
            part.requires_grad_(False)
        model.get_parameter("blocks.4.first.weight").requires_grad = False
        losses += loop.run(model, optimizer, data[2:4])
        model.requires_grad_(True)
        return losses + loop.run(model, optimizer, data[4:])

    data = batches(6)
    model, again = make(), make()
    plain, trainer = prepare_plain(model, adamw(model), device=device, dtype=torch.bfloat16)
    expected = run(plain, trainer)
    wrapped, optimizer = wrap_under(
        spec, again, adamw(again), data[0], device=device, dtype=torch.bfloat16, step_during_backward=inside
    )
    assert run(wrapped, optimizer) == expected
    assert_same(states(wrapped, optimizer), states(plain, trainer))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_was_frozen_when_wrapped_cannot_be_trained(spec: Spec, device: torch.device) -> None:
    def wrapped() -> tuple[nn.Module, ProTrainOptimizer]:
        model = make()
        model.get_submodule("blocks.1").requires_grad_(False)
        return wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)

    data = batches(3)
    model, optimizer = wrapped()
    frozen = model.get_parameter("blocks.1.first.weight")
    attempts: list[Callable[[], Any]] = [
        lambda: model.requires_grad_(True),
        lambda: frozen.requires_grad_(),
        lambda: setattr(frozen, "requires_grad", True),
    ]
    for attempt in attempts:
        with pytest.raises(MisuseError, match=r"blocks\.1\..* was frozen when .* wrapped.*wrap the model anew"):
            attempt()
    frozen.requires_grad_(False)  # as it is
    assert not frozen.requires_grad
    untouched = wrapped()
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))


# -- full_parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_wrong_shape_keeps_no_edit_and_does_no_harm(spec: Spec, device: torch.device) -> None:
    def edit() -> None:
        with protrain.full_parameters(model), torch.no_grad():
            model.get_parameter("enter.weight").zero_()
            model.get_parameter("blocks.1.norm.bias").data = torch.zeros(7)
            model.get_parameter("leave.weight").zero_()

    data = batches(3)
    (model, optimizer), untouched = (wrap_under(spec, m, adamw(m), data[0], device=device) for m in (make(), make()))
    with pytest.raises(ValueError, match=r"blocks\.1\.norm\.bias was given the shape \(7,\), not \(48,\): no edit"):
        edit()
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_nothing_runs_inside_full_parameters(spec: Spec, device: torch.device) -> None:
    data = batches(3)
    (model, optimizer), untouched = (wrap_under(spec, m, adamw(m), data[0], device=device) for m in (make(), make()))
    loss = default_loss(model, data[0])
    runs: list[tuple[str, Callable[[], Any]]] = [
        ("the forward of enter", lambda: model(*data[0])),
        (r"backward\(\)", lambda: loss.backward()),
        (r"step\(\)", lambda: optimizer.step()),
    ]
    for what, run in runs:
        with (
            pytest.raises(MisuseError, match=rf"{what} inside .*full_parameters.*which has blocks.1.*leave it first"),
            protrain.full_parameters(model.get_submodule("blocks.1")),
        ):
            run()
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_full_parameters_within_others_and_their_state_dict(spec: Spec, device: torch.device) -> None:
    data, inner = batches(2), make()
    model, optimizer = wrap_under(spec, inner, adamw(inner), data[0], device=device)
    block: Any = model.get_submodule("blocks.1")
    with protrain.full_parameters(block), torch.no_grad():
        block.norm.bias.fill_(0.25)
        with protrain.full_parameters(model):
            assert (block.norm.bias == 0.25).all()
            model.get_parameter("leave.bias").fill_(0.125)
        assert (model.state_dict()["leave.bias"] == 0.125).all()
        assert (model.state_dict()["blocks.1.norm.bias"] == 0.25).all()
        block.first.bias.fill_(0.5)
        block.load_state_dict({**block.state_dict(), "second.bias": torch.full((48,), 0.75)})
    after = model.state_dict()
    for name, value in (("norm.bias", 0.25), ("first.bias", 0.5), ("second.bias", 0.75)):
        assert (after[f"blocks.1.{name}"] == value).all()
    assert len(set(Loop().run(model, optimizer, data))) == 2
