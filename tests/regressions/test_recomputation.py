"""Blocks that are recomputed in backward find their modules, hooks, buffers and random numbers as in their forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import protrain
from tests.engine.harness import adamw
from tests.regressions.plain import (
    OFFLOADED,
    ON_DEVICE,
    WIDTH,
    Blocks,
    assert_same,
    both_plans,
    check,
    left,
    rows,
    same_bits,
    step,
    train,
    wrapped,
)


class Adapted(nn.Module):
    """A layer with an adapter, a number, a configuration and a list that a script sets from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.activation: nn.Module = nn.GELU()
        self.used, self.scale, self.config, self.factors = True, 1.0, {"power": 1}, [1.0, 1.0]
        self.shift = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) + self.shift
        if self.used:
            x = x + self.adapter(x) * self.scale * self.factors[1]
        return self.activation(x) ** self.config["power"]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "switch": lambda block: setattr(block, "used", False),
    "number": lambda block: setattr(block, "scale", 3.0),
    "tensor": lambda block: setattr(block, "shift", torch.ones(WIDTH)),
    "configuration": lambda block: block.config.update(power=2),
    "list": lambda block: block.factors.__setitem__(1, -1.0),
    "submodule": lambda block: setattr(block, "activation", nn.Tanh()),
    "forward": lambda block: setattr(block, "forward", nn.Tanh()),
}


@both_plans
@pytest.mark.parametrize("change", CHANGES)
def test_a_block_is_recomputed_as_it_was_in_its_forward(plan: str, change: str) -> None:
    """Recomputed blocks ran with modules as they are in backward, and gradients were wrong without an error."""

    def script(model: nn.Module, optimizer: Any) -> list[float]:
        first = model(rows())
        for block in model.get_submodule("blocks").children():
            CHANGES[change](block)
        loss = step(optimizer, first.square().mean() + model(rows(1)).square().mean())
        return [loss, *train(model, optimizer)]

    check(script, plan, lambda: Blocks(Adapted))


@same_bits()
def test_a_hook_that_is_removed_after_the_forward_is_in_its_gradient(model: nn.Module, optimizer: Any) -> list[float]:
    """Where a script removed hooks after a forward, gradients were wrong without an error."""
    layers = [block.get_submodule("0") for block in model.get_submodule("blocks").children()]
    handles = [layer.register_forward_hook(lambda module, args, output: output * 3) for layer in layers]
    loss = model(rows()).square().mean()
    for handle in handles:
        handle.remove()
    return [step(optimizer, loss), *train(model, optimizer)]


class Scaling(nn.Module):
    """A layer that begins to write a buffer or its weight, by an operator on a list, when a script says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.written = nn.Linear(WIDTH, WIDTH), ""
        self.register_buffer("factor", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x)) * self.get_buffer("factor").clone()
        if self.written:
            with torch.no_grad():
                torch._foreach_mul_([self.state_dict(keep_vars=True)[self.written]], 0.9)
        return x


MODES = {"no mode": nullcontext, "a mode": partial(FlopCounterMode, display=False)}
scaled = partial(Blocks, Scaling)
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def write(model: nn.Module, name: str) -> None:
    for block in model.get_submodule("blocks").children():
        vars(block)["written"] = name


@same_bits(scaled)
def test_a_buffer_may_change_between_forward_and_backward(model: nn.Module, optimizer: Any) -> list[float]:
    """A buffer that a forward has read, or updated before, may be changed by the script, late in training."""
    values = []
    for written in ("", "factor"):
        write(model, written)
        values += train(model, optimizer)
        write(model, "")
        loss = model(rows()).square().mean()
        for name, buffer in model.named_buffers():
            buffer.mul_(2 if name.startswith("blocks.1") else 3)
        values.append(step(optimizer, loss))
    return [*values, *train(model, optimizer)]


@each_mode
@pytest.mark.parametrize("keeps", [False, True])
@both_plans
def test_a_block_begins_to_update_a_buffer_late(plan: str, keeps: bool, mode: Callable[[], Any]) -> None:
    """In a dispatch mode, which a plan that keeps attention has itself, the buffer was updated twice."""

    def script(model: nn.Module, optimizer: Any) -> list[float]:
        values = train(model, optimizer)
        write(model, "factor")
        with mode():
            return values + train(model, optimizer, 3)

    check(script, plan, scaled, plans={"keep_attention": keeps})


@each_mode
@pytest.mark.parametrize("keeps", [False, True])
@both_plans
def test_a_block_that_writes_its_weight_is_refused(plan: str, keeps: bool, mode: Callable[[], Any]) -> None:
    """In a dispatch mode the write was lost without a word, and wrap did not see it."""
    model, optimizer = wrapped(plan, scaled, plans={"keep_attention": keeps})
    train(model, optimizer)
    write(model, "linear.weight")
    with pytest.raises(protrain.MisuseError, match=r"data of blocks\.0\.linear\.weight was changed in place"), mode():
        train(model, optimizer)
    write(other := scaled(), "linear.weight")
    with pytest.raises(ValueError, match=r"changes its parameter blocks\.0\.linear\.weight in place"):
        wrapped(ON_DEVICE, lambda: other)


def test_a_block_that_writes_its_input_is_refused_under_every_plan() -> None:
    """A plan decided whether it could train, and torch's error about leaves said nothing of the cause."""
    with pytest.raises(protrain.MisuseError, match=r"blocks\.3 needs its inputs.*changed in place.*inplace=False"):
        wrapped(ON_DEVICE, lambda: Blocks(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))))


def test_an_error_of_the_first_forward_names_the_module() -> None:
    """An error of the model in its first forward, such as an index beyond an embedding, names the module."""
    model = nn.Sequential(nn.Embedding(8, WIDTH), Blocks())
    with pytest.raises(IndexError) as caught:
        protrain.wrap(model, adamw(model), example_batch=(torch.tensor([3, 8]),), device="cpu", progress=False)
    assert any("0, which is Embedding(8, 16)" in note for note in caught.value.__notes__)


class Counted(nn.Linear):
    runs = 0

    def forward(self, input: Tensor) -> Tensor:
        Counted.runs += 1
        return torch.tanh(super().forward(input))


def counted() -> nn.Module:
    return Blocks(lambda: nn.Sequential(Counted(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


BATCH = rows(count=64)


def runs_of_steps(model: nn.Module, optimizer: Any) -> list[int]:
    """How often a block's layers run in a step."""
    runs = []
    for count in (64, 72, 64):
        Counted.runs = 0
        step(optimizer, model(rows(count=count)).square().mean())
        runs.append(Counted.runs)
    return runs


def test_a_larger_batch_trains_with_every_block_recomputed_where_that_gives_the_room() -> None:
    """A batch that is larger than the planned one was refused even if there was room, or recomputation gave it."""
    ample = wrapped(ON_DEVICE, counted, BATCH)
    plan = ample[1].plan
    assert runs_of_steps(*ample) == [4, 4, 4]
    tight = wrapped(ON_DEVICE, counted, BATCH, plan=plan, device_memory=plan.device_bytes)
    with pytest.warns(UserWarning, match=r"x has shape \(72, 16\), larger than the \(64, 16\).*recomputed"):
        assert runs_of_steps(*tight) == [4, 8, 4]
    assert_same(left(*tight), left(*ample))


def test_a_batch_for_which_there_is_no_memory_is_refused_with_what_is_missing() -> None:
    """Where recomputation does not give the room, the error says how much is missing, and the training goes on."""
    plan = wrapped(OFFLOADED, batch=BATCH)[1].plan
    found = []
    for refused in (True, False):
        model, optimizer = wrapped(OFFLOADED, batch=BATCH, device_memory=plan.device_bytes if refused else "4GiB")
        if refused:
            with pytest.raises(protrain.MisuseError, match=r"x has shape \(96, 16\), larger .* are free"):
                model(rows(count=96))
        model(BATCH).square().mean().backward()
        optimizer.step()
        found.append(left(model, optimizer))
    assert_same(*found)
