"""Gradients: what a script reads of them, what its hooks do to them, and how they are added up and clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import protrain
from tests.regressions.plain import WIDTH, Blocks, both_plans, rows, same_bits, step, train, wrapped

FIRST = "blocks.0.0.weight"


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


@both_plans
def test_a_backward_more_than_was_planned_is_refused_and_the_step_goes_on(plan: str) -> None:
    """More backward() calls than wrap(accumulation=...) says are an error that prints what to write."""
    norms = []
    for refused in (False, True):
        model, optimizer = wrapped(plan, accumulation=3)
        for seed in range(3):
            model(rows(seed)).square().mean().backward()
        if refused:
            with pytest.raises(protrain.MisuseError, match=r"accumulation=4"):
                model(rows(3)).square().mean().backward()
        norms.append(optimizer.clip_grad_norm_(0.1).item())
    assert norms[1] == norms[0]


@same_bits(plans={"n_speculate": 4})
def test_a_parameter_whose_gradient_is_set_to_none_stays_as_it_is(model: nn.Module, optimizer: Any) -> list[float]:
    """``parameter.grad = None`` of some parameters was refused by step()."""
    values = train(model, optimizer)
    for seed in (2, 3):
        model(rows(seed)).square().mean().backward()
        model.get_parameter(FIRST).grad = None
        assert model.get_parameter(FIRST).grad is None
        values.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return [*values, *train(model, optimizer)]


@same_bits(lambda: Blocks(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU())))
def test_a_batch_of_gradients_is_taken_through_dropout(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """is_grads_batched=True and torch.func.vmap failed where a recomputed block draws random numbers."""
    x = rows().requires_grad_()
    output = model(x)
    each = torch.eye(WIDTH)[:3, None].expand(3, *output.shape)
    found = list(torch.autograd.grad(output, [x], each, is_grads_batched=True, retain_graph=True))
    found += [torch.func.vmap(lambda e: torch.autograd.grad(output, x, e, retain_graph=True)[0])(each)]
    step(optimizer, output.square().mean())
    return found


@same_bits()
def test_a_hook_on_several_gradients_is_called_with_all_of_them(model: nn.Module, optimizer: Any) -> list[Any]:
    """register_multi_grad_hook and get_gradient_edge failed for a parameter of a wrapped model."""
    seen: list[Any] = []
    parameters = [model.get_parameter(FIRST), model.get_parameter("blocks.3.2.bias")]
    handle = register_multi_grad_hook(parameters, lambda gradients: seen.extend(g.clone() for g in gradients))
    losses = train(model, optimizer)
    handle.remove()
    edge = get_gradient_edge(parameters[0])
    seen += torch.autograd.grad(model(rows()).square().mean(), [edge])
    assert len(seen) == 5
    return [*losses, *seen]


@same_bits()
def test_a_hook_behind_the_gradient_changes_what_the_step_uses(model: nn.Module, optimizer: Any) -> list[Any]:
    """A hook of register_post_accumulate_grad_hook clamps the gradient, and reads all of it."""
    seen: list[Tensor] = []
    for name in (FIRST, "blocks.2.2.bias"):
        parameter = model.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(clamp)
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    return [*train(model, optimizer), *seen]


@same_bits()
def test_a_loss_of_weights_alone_calls_hooks(model: nn.Module, optimizer: Any) -> list[float]:
    """Where the loss is made of weights alone, hooks behind the gradient failed."""
    seen: list[float] = []
    weight = model.get_parameter(FIRST)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    step(optimizer, weight.square().sum())
    return [*seen, *train(model, optimizer)]


@same_bits()
def test_a_parameter_of_the_same_type_and_shape_has_its_values(model: nn.Module, optimizer: Any) -> list[Any]:
    """p.to(p), p.type_as(p) and p.view_as(p) outside forward returned memory that nothing had written."""
    values = train(model, optimizer, 1)
    weight = model.get_parameter(FIRST)
    found = [each.detach().clone() for each in (weight.to(weight), weight.type_as(weight), weight.view_as(weight))]
    return [*values, *found, *train(model, optimizer)]


@both_plans
def test_zeros_in_place_of_a_gradient_do_not_move_a_weight_without_a_word(plan: str) -> None:
    """A step went without a word where zero_grad(set_to_none=False) had left zeros, which torch would decay."""
    model, optimizer = wrapped(plan)
    model(rows()).square().mean().backward()
    optimizer.zero_grad(set_to_none=False)
    model.get_parameter(FIRST).square().sum().backward()
    with pytest.raises(protrain.MisuseError, match=r"call zero_grad\(\) without set_to_none=False"):
        optimizer.step()
    optimizer.zero_grad()
    assert train(model, optimizer) == train(*wrapped(plan))


@both_plans
def test_a_penalty_from_before_the_first_call_is_refused_in_its_backward(plan: str) -> None:
    """It read offloaded weights that were no longer there: that of absolute values gave zeros as the gradient."""
    model, _ = wrapped(plan, late=True)
    penalty = sum(parameter.abs().sum() for parameter in model.parameters())
    loss = model(rows()).square().mean() + penalty
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
