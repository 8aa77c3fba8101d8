"""The optimizer, averages of weights, and weights that a script freezes, edits or looks at between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import protrain
from tests.engine.harness import adamw
from tests.regressions.plain import (
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
    whole,
    wrapped,
)


@same_bits(late=True)
def test_what_is_frozen_in_the_first_call_is_trained_later(model: nn.Module, optimizer: Any) -> list[float]:
    """Without an example batch, parameters that were frozen in the first call could never be trained."""
    part = model.get_submodule("blocks.1").requires_grad_(False)
    values = train(model, optimizer)
    part.requires_grad_(True)
    values += train(model, optimizer)
    assert sorted({int(state["step"]) for state in optimizer.state_dict()["state"].values()}) == [2, 4]
    return values


@both_plans
def test_moments_are_not_looked_for_where_there_are_none(plan: str) -> None:
    """optimizer.state raises, where a script would find nothing and change nothing."""
    model, optimizer = wrapped(plan)
    train(model, optimizer)
    with pytest.raises(protrain.MisuseError, match=r"read them with optimizer\.state_dict\(\)"):
        [moments["exp_avg"].zero_() for moments in optimizer.state.values()]


@both_plans
def test_a_state_that_is_not_adams_is_refused_and_changes_nothing(plan: str) -> None:
    """An optimizer's state with other entries than Adam's began moments anew without a word."""
    model, optimizer = wrapped(plan)
    train(model, optimizer)
    before, state = left(model, optimizer), optimizer.state_dict()
    state["state"] = {number: {"momentum_buffer": each["exp_avg"]} for number, each in state["state"].items()}
    with pytest.raises(ValueError, match=r"lacks 'step' and has 'momentum_buffer': load a state of Adam"):
        optimizer.load_state_dict(state)
    assert_same(left(model, optimizer), before)


@same_bits()
def test_a_weight_is_clamped_after_every_step(model: nn.Module, optimizer: Any) -> list[float]:
    """A script that clamps one weight after every step had to make the whole model whole for it."""
    weight, values = model.get_parameter("blocks.1.2.weight"), []
    for seed in range(3):
        values += train(model, optimizer, 1, seed=seed)
        with whole(weight, optimizer), torch.no_grad():
            weight.clamp_(-0.1, 0.1)
    return values


def halve_in_a_list(weight: Tensor) -> None:
    torch._foreach_mul_([weight], 0.5)


def descend_by_a_fused_operation(weight: Tensor) -> None:
    options: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags: dict[str, Any] = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([weight], [torch.ones(weight.shape)], [], **options, **flags)


WRITES = {  # that torch does not count in the versions of what they write to
    "list": halve_in_a_list,
    "list of copies": lambda weight: halve_in_a_list(weight.detach()),
    "fused": descend_by_a_fused_operation,
}


@both_plans
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_under_a_dispatch_mode_is_kept_inside_full_parameters(plan: str, write: Callable[..., None]) -> None:
    def script(model: nn.Module, optimizer: Any) -> list[float]:
        values, weight = train(model, optimizer, 1), model.get_parameter("blocks.1.2.weight")
        with whole(weight, optimizer), torch.no_grad(), FlopCounterMode(display=False):
            write(weight)
        return values + train(model, optimizer)

    check(script, plan)


@both_plans
@pytest.mark.parametrize(
    "write", [*WRITES.values(), lambda weight: weight.set_(torch.ones(weight.shape))], ids=[*WRITES, "memory"]
)
def test_a_write_under_a_dispatch_mode_is_refused_elsewhere(plan: str, write: Callable[[Any], None]) -> None:
    """It was lost without a word."""
    model, optimizer = wrapped(plan)
    values, weight = train(model, optimizer, 1), model.get_parameter("blocks.1.2.weight")
    with pytest.raises(protrain.MisuseError, match=r"full_parameters"), torch.no_grad(), FlopCounterMode(display=False):
        write(weight)
    assert values + train(model, optimizer, 2, seed=1) == train(*wrapped(plan), 3)


@both_plans
def test_weights_are_replaced_in_inference_mode_where_they_may_be(plan: str) -> None:
    """It failed with an error of torch, which knows no versions of what is made in inference mode."""
    model, _ = wrapped(plan)
    weight = model.get_parameter("blocks.1.2.weight")
    with torch.inference_mode():
        assert weight.view(torch.uint8).sum() == weight.detach().clone().view(torch.uint8).sum()
        weight.data = weight.detach().clone()
        with pytest.raises(protrain.MisuseError, match=r"data of blocks\.1\.2\.weight was replaced"):
            weight.data = torch.ones(weight.shape)


@same_bits()
def test_detach_in_place_freezes(model: nn.Module, optimizer: Any) -> list[float]:
    """It did nothing."""
    weight = model.get_parameter("blocks.1.2.weight")
    weight.detach_()
    return [*train(model, optimizer), float(weight.requires_grad)]


def edit(model: nn.Module, optimizer: Any) -> None:
    with protrain.full_parameters(model), torch.no_grad():
        next(model.parameters()).zero_()


@both_plans
@pytest.mark.parametrize(
    "write",
    [
        lambda model, optimizer: model.load_state_dict(model.state_dict()),
        lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        edit,
        lambda model, optimizer: step(optimizer, model(rows()).square().mean()),
    ],
    ids=["load weights", "load states", "edit", "step"],
)
@pytest.mark.parametrize("inside", [False, True])
def test_nothing_is_written_while_averages_stand_in(plan: str, write: Callable[..., None], inside: bool) -> None:
    """Weights that were loaded, edited or updated inside AveragedWeights.applied() were lost."""
    model, optimizer = wrapped(plan, step_during_backward=inside)
    averaged = protrain.AveragedWeights(model, decay=0.9)
    for seed in range(2):
        step(optimizer, model(rows(seed)).square().mean())
        averaged.update()
    before, average = left(model, optimizer), averaged.state_dict()
    with pytest.raises(protrain.MisuseError, match=r"inside `with AveragedWeights\.applied\(\)`"), averaged.applied():
        write(model, optimizer)
    optimizer.zero_grad()
    assert_same(left(model, optimizer), before)
    assert_same(averaged.state_dict(), average)


@both_plans
def test_averages_are_not_averaged(plan: str) -> None:
    """A second AveragedWeights that was updated inside applied() of the first took averages for weights."""
    model, optimizer = wrapped(plan)
    averaged, other = protrain.AveragedWeights(model), protrain.AveragedWeights(model)
    train(model, optimizer)
    averaged.update()
    with pytest.raises(protrain.MisuseError, match=r"inside `with .*: leave it first"), averaged.applied():
        other.update()
    other.update()
    assert_same(other.state_dict(), averaged.state_dict())


def test_weights_of_one_memory_are_refused_by_name() -> None:
    """A trained parameter that shares memory with another tensor came apart in training without a word."""
    model = Blocks()
    both = torch.randn(2, 32)
    model.get_submodule("blocks.0.0").bias = nn.Parameter(both[0])
    model.get_submodule("blocks.1.0").bias = nn.Parameter(both.view(-1)[16:48])
    with pytest.raises(ValueError, match=r"blocks\.[01]\.0\.bias.*memory"):
        protrain.wrap(model, adamw(model), example_batch=rows(), device="cpu", progress=False)


def test_a_float64_model_is_refused_and_frozen_float64_stays() -> None:
    """A float64 model was trained in the type of the other weights without a word."""
    model = Blocks().double()
    with pytest.raises(ValueError, match=r"float64"):
        protrain.wrap(model, adamw(model), example_batch=rows().double(), device="cpu", progress=False)

    class Scaled(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((WIDTH,), 1 / 3, dtype=torch.float64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale.float())

    def script(model: nn.Module, optimizer: Any) -> list[Any]:
        return [*train(model, optimizer), model.get_parameter("scale").detach().clone()]

    check(script, "on the device", Scaled)


@both_plans
def test_the_memory_of_a_wrapped_model_is_not_shared(plan: str) -> None:
    """share_memory() of a wrapped model did nothing."""
    model, _ = wrapped(plan)
    with pytest.raises(protrain.MisuseError, match=r"cannot share its memory .* give them model\.state_dict\(\)"):
        model.share_memory()


@both_plans
@pytest.mark.parametrize(
    "reads", [lambda m, o: m.state_dict(), lambda m, o: o.state_dict()], ids=["model", "optimizer"]
)
def test_no_state_is_read_inside_a_backward_that_updates(plan: str, reads: Callable[..., Any]) -> None:
    """With step_during_backward=True a state_dict() inside backward had new and old weights without a word."""
    model, optimizer = wrapped(plan, step_during_backward=True)
    said: list[str] = []

    def hook(*_: Any) -> None:
        with pytest.raises(protrain.MisuseError) as caught:
            reads(model, optimizer)
        said.append(str(caught.value))

    handle = model.get_submodule("blocks.1").register_full_backward_hook(hook)
    x = rows()
    model(x).square().mean().backward()
    handle.remove()
    assert len(said) == 1
    assert "backward" in said[0]
    optimizer.step()
    assert reads(model, optimizer)
