"""Hooks of register_post_accumulate_grad_hook: .grad is as in torch, or a backward that would need a sum is refused.

torch calls them with the sum of the gradients of all backwards since zero_grad() in .grad.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protrain.common.errors import MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.pool import on_ranks
from tests.engine.harness import CKPT, FEW_PLANS, NONE, Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.plain_loop import prepare_plain
from tests.engine.residual import batches, make

CPU = torch.device("cpu")
SPECS = (Spec("all", "least", (NONE,)), *FEW_PLANS[:2])
ALL_SPECS = pytest.mark.parametrize("spec", SPECS, ids=str)
FIRST = "enter.weight"  # whose gradient comes last
REFUSED = f"^{FIRST} has a hook .*register_post_accumulate_grad_hook.*earlier backward.*in a tensor hook"


def wrapped(spec: Spec, device: torch.device = CPU, **options: Any) -> tuple[Any, ProTrainOptimizer]:
    model = make()
    return wrap_under(spec, model, adamw(model), batches()[0], device=device, **options)


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def backward(model: nn.Module, place: int) -> None:
    """The backward of a loss of one of the batches."""
    torch.manual_seed(place)
    (batch,) = batches()[place]
    default_loss(model, (batch.to(next(model.parameters()).device),)).backward()


@pytest.mark.parametrize("accumulation", [1, 2])
@ALL_SPECS
def test_a_second_backward_is_refused_before_it_changes_anything(
    spec: Spec, accumulation: int, device: torch.device
) -> None:
    """The step goes on with what the first backward has brought, and another one begins."""
    calls: list[str] = []

    def watched(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(clamp)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))

    again = make()
    watched(again)
    plain, its_optimizer = prepare_plain(again, adamw(again), device=device, dtype=torch.bfloat16)
    model, optimizer = wrapped(spec, device, dtype=torch.bfloat16, accumulation=accumulation)
    watched(model)
    for place in range(2):
        backward(plain, place)
        backward(model, place)
        before = len(calls)
        with pytest.raises(MisuseError, match=REFUSED):
            backward(model, 3)
        assert len(calls) == before
        for each in (its_optimizer, optimizer):
            each.step()
            each.zero_grad()
    assert_same(states(model, optimizer), states(plain, its_optimizer))


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=str)
def test_updates_inside_backward_are_not_begun(spec: Spec, device: torch.device) -> None:
    model, optimizer = wrapped(spec, device, accumulation=2, step_during_backward=True)
    model.get_parameter(FIRST).register_post_accumulate_grad_hook(clamp)
    before = states(model, optimizer)
    with model.no_sync():
        backward(model, 0)
    with pytest.raises(MisuseError, match=REFUSED):
        backward(model, 1)
    assert_same(states(model, optimizer), before)


@ALL_SPECS
def test_backwards_that_bring_the_parameter_no_second_gradient_go_on(spec: Spec, device: torch.device) -> None:
    """They are refused for none of the hooks that torch does not call, or calls with the gradient alone."""

    def run(model: nn.Module) -> list[Any]:
        seen: list[Any] = []

        def forget(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.double().norm().item())
            parameter.grad = None

        entering, leaving = model.get_parameter(FIRST), model.get_parameter("leave.weight")
        hook = entering.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.double().norm().item()))
        leaving.register_post_accumulate_grad_hook(forget)
        backward(model, 0)
        x = batches()[1][0].to(entering.device)
        seen += [g.double().norm().item() for g in torch.autograd.grad(default_loss(model, (x,)), [entering])]
        default_loss(model, (x,)).backward(inputs=[leaving])
        entering.requires_grad_(False)
        backward(model, 2)
        entering.requires_grad_(True)
        hook.remove()
        entering.register_hook(lambda gradient: seen.append(gradient.double().norm().item()))
        backward(model, 3)
        return seen

    expected = run(make().to(device).eval())
    assert len(expected) == 2 + 1 + 1 + 1 + 2
    assert run(wrapped(spec, device, accumulation=4)[0].eval()) == pytest.approx(expected, rel=1e-5)


class Shared(nn.Module):
    """Blocks that use one weight."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        for block in self.blocks:
            block.get_submodule("0").weight = self.blocks[0].get_parameter("0.weight")
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return self.leave(x)


@ALL_SPECS
def test_a_weight_of_several_blocks_has_its_whole_gradient_once(spec: Spec, device: torch.device) -> None:
    def run(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        seen: list[float] = []
        weight = model.blocks[0][0].weight
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.double().norm().item()))
        for place in range(2):
            backward(model, place)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    plain, model = Shared().to(device), Shared()
    expected = run(plain, adamw(plain))
    assert len(expected) == 2
    found = run(*wrap_under(spec, model, adamw(model), batches()[0], device=device))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("writes", [False, True])
@ALL_SPECS
def test_sums_inside_one_backward_are_refused_where_the_hook_wants_them(spec: Spec, writes: bool) -> None:
    """A reentrant checkpoint is a backward inside the backward: torch calls the hook after each."""
    model = Shared()
    trained, _ = wrap_under(spec, model, adamw(model), batches()[0], device=CPU)
    model.reentrant, name, calls = True, "blocks.0.0.weight", []

    def hook(parameter: Tensor) -> None:
        calls.append(parameter)
        if writes:
            parameter.grad = torch.zeros_like(parameter)
        else:
            clamp(parameter)

    trained.get_parameter(name).register_post_accumulate_grad_hook(hook)
    with pytest.raises(MisuseError, match=f"^{name} has a hook"):
        backward(trained, 0)
    assert len(calls) == 2


@pytest.mark.parametrize("spec", [SPECS[0], Spec("none", "least", (CKPT,))], ids=str)
def test_a_loss_of_weights_alone(spec: Spec, device: torch.device) -> None:
    """Nothing but the hook tells that its backward has begun."""
    model, _ = wrapped(spec, device)
    weight, seen = model.get_parameter(FIRST), []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    weight.sum().backward()
    assert seen == [weight.numel()]
    with pytest.raises(MisuseError, match=REFUSED):
        weight.sum().backward()
    assert weight.grad.norm().item() == pytest.approx(weight.numel() ** 0.5)


def refused_on_rank(rank: int, spec: Spec) -> tuple[str, dict[str, Tensor]]:
    """The error of a second backward, and the states after the step that goes on."""
    model, optimizer = wrapped(spec, accumulation=2, world_size=2, gradient_reduction="sum")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    error = ""
    for step in range(2):
        backward(model, 2 * step + rank)
        try:
            backward(model, 5)
        except MisuseError as caught:
            error = str(caught)
        optimizer.step()
        optimizer.zero_grad()
    return error, states(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=str)
def test_ranks_refuse_it_alike_and_go_on(spec: Spec) -> None:
    found = on_ranks(2, refused_on_rank, spec)
    alone, optimizer = wrapped(spec, accumulation=2)
    for parameter in alone.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    for step in range(2):
        for rank in range(2):
            backward(alone, 2 * step + rank)
        optimizer.step()
        optimizer.zero_grad()
    for parameter in alone.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    backward(alone, 0)
    with pytest.raises(MisuseError, match=REFUSED) as caught:
        backward(alone, 1)
    for error, at_the_end in found:
        assert error == str(caught.value)
        assert_same(at_the_end, states(alone, optimizer))
