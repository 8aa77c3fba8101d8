"""What a script or model puts around blocks works as on a plain model: hooks, other forwards, its own checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    FEW_PLANS,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.residual import batches, make


def before(block: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
    return (args[0] * block.first.weight.square().mean() + block.norm.bias,)


def after(block: Any, _: Any, output: Tensor) -> Tensor:
    return torch.tanh(output @ block.second.weight) + output


def hooked(model: nn.Module) -> nn.Module:
    """The model with hooks that use the weights of their modules: before some blocks, behind others, and both."""
    for index, block in enumerate(model.get_submodule("blocks").children()):
        if index % 3 != 1:
            block.register_forward_pre_hook(before)
        if index % 3 != 2:
            block.register_forward_hook(after)
    model.get_submodule("enter").register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),))
    model.get_submodule("leave").register_forward_hook(lambda module, _, out: out * module.weight.mean() + module.bias)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_use_the_weights_of_their_block(dtype: torch.dtype, device: torch.device) -> None:
    specs = FEW_PLANS[(dtype is torch.bfloat16) :: 2]
    check_equal_to_plain(lambda: hooked(make()), batches(2), device=device, dtype=dtype, specs=specs)


# -- checkpointing of the model's own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before wrap", "after wrap"])
@pytest.mark.parametrize("spec", [Spec("all", "least", "n"), Spec("none", "least", "ncs")], ids=str)
def test_what_is_switched_on_is_switched_off_and_said(
    tiny_model: Callable[..., Any], tiny_batch: Callable[..., dict[str, Tensor]], spec: Spec, when: str
) -> None:
    """As a training script does by its own flag: the plan decides what is recomputed, with the same results."""

    def wrapped(switched_on: bool) -> tuple[Any, ProTrainOptimizer]:
        model = tiny_model("llama").train()
        if switched_on:
            model.gradient_checkpointing_enable()
        return wrap_under(spec, model, adamw(model), batch)

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


def test_a_forward_that_was_replaced_may_use_weights_of_modules_that_it_does_not_call(device: torch.device) -> None:
    """As a trainer's fused loss uses the weight of the head."""

    def fused(model: Any, x: Tensor) -> Tensor:
        x = model.enter(x)
        for block in model.blocks:
            x = block(x)
        return x @ model.leave.weight.t()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        model.forward = functools.partial(fused, model)
        return default_loss(model, batch)

    check_equal_to_plain(make, batches(2), device=device, run=Loop(loss=loss).run)
