"""Hooks on modules that are units use their parameters, and forwards are replaced, as on a plain model."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    FEW_PLANS,
    NONE,
    SWAP,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    plain_run,
    seeded,
    states,
    wrap_under,
)
from tests.engine.residual import Block, Model, batches

SPECS = [*FEW_PLANS, *(Spec("none", "least", (mode,), small=True) for mode in (NONE, CKPT, SWAP, CKPT_SWAP))]


def before(block: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
    return (args[0] * block.first.weight.square().mean() + block.norm.bias,)


def after(block: Any, _: Any, output: Tensor) -> Tensor:
    return torch.tanh(output @ block.second.weight) + output


def note(calls: list[str], *_: Any) -> None:
    calls.append("after")


def hooked(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    model.get_submodule("leave").register_forward_hook(lambda module, _, out: out * module.weight.mean() + module.bias)
    return model


class Rows(Model):
    """Blocks are single layers, normalised by hooks on the blocks themselves."""

    def __init__(self, normalise: Callable[[Any], Any]) -> None:
        super().__init__(48, 0)
        self.blocks = nn.ModuleList(normalise(nn.Linear(48, 48)) for _ in range(4))
        self.leave = normalise(self.leave)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_hooks_use_the_weights_of_their_block(device: torch.device) -> None:
    def make() -> nn.Module:
        with seeded():
            return hooked(Model(48, 4))

    for part, dtype in enumerate((torch.float32, torch.bfloat16)):
        check_equal_to_plain(make, batches(2), device=device, dtype=dtype, specs=SPECS[part::2])


@pytest.mark.parametrize(("normalise", "part"), [(nn.utils.weight_norm, 0), (nn.utils.spectral_norm, 1)])
def test_normalised_by_hooks(normalise: Callable[[Any], Any], part: int, device: torch.device) -> None:
    def make() -> nn.Module:
        with seeded(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return Rows(normalise)

    check_equal_to_plain(make, batches(2), device=device, specs=SPECS[part::2])


def test_hooks_that_come_after_wrapping_run_once_a_call(device: torch.device) -> None:
    def make() -> nn.Module:
        with seeded():
            return Model(48, 4)

    expected, final = plain_run(lambda: hooked(make()), batches(2), loop=Loop(), device=device, dtype=torch.float32)
    for spec in FEW_PLANS:
        model = make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches(1)[0], device=device)
        calls: list[str] = []
        hooked(wrapped).get_submodule("blocks.1").register_forward_hook(partial(note, calls))
        assert Loop().run(wrapped, optimizer, batches(2)) == expected, str(spec)
        assert_same(states(wrapped, optimizer), final, where=str(spec))
        assert len(calls) == 2


@pytest.mark.parametrize("mode", [NONE, CKPT])
def test_a_forward_that_is_replaced_after_wrapping(mode: Any, device: torch.device) -> None:
    def replaced(model: nn.Module) -> nn.Module:
        block = model.get_submodule("blocks.1")
        block.forward = types.MethodType(lambda self, x: Block.forward(self, x) * 2, block)
        return model

    def make() -> nn.Module:
        with seeded():
            return Model(48, 4)

    expected, final = plain_run(lambda: replaced(make()), batches(2), loop=Loop(), device=device, dtype=torch.float32)
    model = make()
    spec = Spec("none", "least", (mode,))
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batches(1)[0], device=device)
    replaced(wrapped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert Loop().run(wrapped, optimizer, batches(2)) == expected
    assert_same(states(wrapped, optimizer), final)
    said = [str(warning.message) for warning in caught if "replaced after protrain.wrap" in str(warning.message)]
    assert bool(said) == (mode is CKPT)
    assert not said or "blocks.1" in said[0]
