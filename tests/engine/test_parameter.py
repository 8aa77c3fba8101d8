"""Managed parameters whose flags are changed, or whose values are edited, after wrapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
