"""Blocks that run otherwise than the plan has it: under checkpoints of the model's own, or without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import protrain
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    CKPT,
    FEW_PLANS,
    NONE,
    SWAP,
    Batch,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    seeded,
    states,
    wrap_under,
)
from tests.engine.residual import Model, batches

CPU = torch.device("cpu")


@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
@pytest.mark.parametrize("spec", [Spec("all", "least", (NONE,)), Spec("none", "least", (NONE, CKPT, SWAP))], ids=str)
def test_what_is_switched_on_is_switched_off_and_said(
    tiny_model: Callable[..., Any], tiny_batch: Callable[..., dict[str, Tensor]], spec: Spec, when: str
) -> None:
    """As a training script does by its own flag: the plan decides what is recomputed, with the same results."""

    def wrapped(switched_on: bool) -> tuple[Any, ProTrainOptimizer]:
        model = tiny_model("llama").train()
        if switched_on:
            model.gradient_checkpointing_enable()
        return wrap_under(spec, model, adamw(model), batch, device=CPU)

    batch, words = tiny_batch(), "gradient checkpointing of model.* was switched off.*the same results"
    untouched = wrapped(False)
    if when == "before wrap":
        with pytest.warns(UserWarning, match=words):
            model, optimizer = wrapped(True)
        losses = Loop().run(model, optimizer, [batch] * 2)
    else:
        model, optimizer = wrapped(False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        with pytest.warns(UserWarning, match=words):
            losses = Loop().run(model, optimizer, [batch] * 2)
    assert losses == Loop().run(*untouched, [batch] * 2)
    assert_same(states(model, optimizer), states(*untouched))


class Checkpointing(Model):
    """Each block under a checkpoint, together with an operation of its own that saves its output."""

    reentrant: bool | None = None  # None: no checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = (
                torch.tanh(block(x))
                if self.reentrant is None
                else checkpoint(lambda x, block=block: torch.tanh(block(x)), x, use_reentrant=self.reentrant)
            )
        return self.leave(x)


def make() -> nn.Module:
    with seeded():
        return Checkpointing(48, 5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_the_model_runs_again_inside_backward_have_the_same_bits(reentrant: bool) -> None:
    def loss(model: Any, batch: Batch) -> Tensor:
        model.reentrant = reentrant
        return default_loss(model, batch)

    check_equal_to_plain(make, batches(3), loop=Loop(loss=loss), device=CPU, specs=FEW_PLANS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_the_model_runs_again_inside_backward_cannot_be_profiled(reentrant: bool) -> None:
    model: Any = make()
    model.reentrant = reentrant
    words = r"the model itself computes blocks\.4 again inside backward: take out torch\.utils\.checkpoint"
    with pytest.raises(ValueError, match=words):
        protrain.wrap(model, adamw(model), example_batch=batches(1)[0], device="cpu", progress=False)
    model.reentrant = None
    protrain.wrap(model, adamw(model), example_batch=batches(1)[0], device="cpu", progress=False)


class Tower(Model):
    """Its first two blocks are frozen, and run without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.enter(x)
            for block in self.blocks[:2]:
                x = block(x)
        for block in self.blocks[2:]:
            x = block(x)
        return self.leave(x)


def test_blocks_that_the_model_runs_without_gradients_have_the_same_bits() -> None:
    def tower() -> nn.Module:
        with seeded():
            model = Tower(48, 5)
        model.enter.requires_grad_(False)
        model.blocks[:2].requires_grad_(False)
        return model

    check_equal_to_plain(tower, batches(3), device=CPU, specs=FEW_PLANS)
