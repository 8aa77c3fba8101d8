"""Training loops of every shape have the plain loop's bits: what is done between forward, backward and step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.harness import (
    FEW_PLANS,
    NONE,
    SWAP,
    Batch,
    Loop,
    Spec,
    Trainer,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain
from tests.engine.residual import batches, make


def two_forwards(model: nn.Module, batch: Batch) -> Tensor:
    return default_loss(model, batch) + default_loss(model, (batch[0].flip(0),)) * 0.5


def later_half(model: nn.Module, batch: Batch) -> Tensor:
    """The first output is used after a second forward, and only in part."""
    first = model(*batch)
    second = model(batch[0][:3])
    return first[:2].float().square().sum() + second.float().abs().sum()


def with_autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16):
        return default_loss(model, batch)


def looked_at_between(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        before = default_loss(model, batch)
    with torch.inference_mode():
        model(batch[0][:2])
    model.eval()
    with torch.no_grad():
        evaluated = default_loss(model, batch)
    model.train()
    return default_loss(model, batch) * (1 + before + evaluated.clone())


def looked_at_inside(model: nn.Module, batch: Batch) -> Tensor:
    """A forward without gradients between a forward and its backward."""
    loss = default_loss(model, batch)
    with torch.no_grad():
        default_loss(model, (batch[0][:4],))
    return loss


LOSSES: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "two forwards": two_forwards,
    "part of an output": later_half,
    "autocast": with_autocast,
    "evaluation between steps": looked_at_between,
    "evaluation inside a step": looked_at_inside,
}


@pytest.mark.parametrize("name", LOSSES)
def test_forwards(name: str, device: torch.device) -> None:
    """Every loop meets every plan, half of them in either type. Which half changes from one loop to the next."""
    loop, turn = Loop(max_norm=1.0, loss=LOSSES[name]), list(LOSSES).index(name)
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        specs = FEW_PLANS[(turn + number) % 2 :: 2]
        check_equal_to_plain(make, batches(2), device=device, dtype=dtype, loop=loop, specs=specs)


def test_backward_finds_weights_in_another_buffer_than_forward_did(device: torch.device) -> None:
    """Under most plans a chunk comes back to the buffer that it had, and a view that is not made anew is right."""
    loop, spec = Loop(max_norm=1.0, loss=looked_at_inside), Spec("none", "middle", (NONE,))
    check_equal_to_plain(make, batches(2), device=device, dtype=torch.float32, loop=loop, specs=(spec,))


def test_adam_with_coupled_weight_decay(device: torch.device) -> None:
    check_equal_to_plain(
        make,
        batches(2),
        device=device,
        dtype=torch.bfloat16,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.1),
    )


def same_as_plain(run: Callable[[nn.Module, Trainer], list[Tensor]], device: torch.device) -> None:
    """What ``run`` returns has the plain loop's bits under every plan."""
    plain = make()
    expected = run(*prepare_plain(plain, adamw(plain), device=device, dtype=torch.bfloat16))
    for spec in FEW_PLANS:
        model = make()
        found = run(*wrap_under(spec, model, adamw(model), batches()[0], device=device, dtype=torch.bfloat16))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), str(spec)


@pytest.mark.parametrize("newer", [False, True], ids=["is_grads_batched", "torch.func.vmap"])
def test_gradients_of_several_outputs_at_once(newer: bool, device: torch.device) -> None:
    """torch takes them by vmap, inside which blocks with dropout are recomputed."""

    def run(model: nn.Module, optimizer: Trainer) -> list[Tensor]:
        found: list[Tensor] = []
        torch.manual_seed(1)
        for batch in batches(2):
            x = batch[0].to(device).requires_grad_()
            output = model(x)
            each = torch.eye(4, dtype=output.dtype, device=device)[:, None].expand(4, *output.shape)
            if newer:
                one = functools.partial(torch.autograd.grad, output, x, retain_graph=True)
                found += torch.func.vmap(one)(each)
            else:
                found += torch.autograd.grad(output, [x], each, is_grads_batched=True, retain_graph=True)
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    same_as_plain(run, device)


def test_inputs_get_their_gradients(device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer) -> list[Tensor]:
        gradients = []
        torch.manual_seed(1)
        for batch in batches(2):
            x = batch[0].to(device).requires_grad_()
            model(x).float().square().mean().backward()
            assert x.grad is not None
            gradients.append(x.grad)
            (other,) = torch.autograd.grad(model(x).float().sum(), [x])
            gradients.append(other)
            optimizer.step()
            optimizer.zero_grad()
        return gradients

    same_as_plain(run, device)


def test_an_evaluation_after_backward_has_the_old_weights(device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer) -> list[Tensor]:
        outputs = []
        torch.manual_seed(1)
        for batch in batches(2):
            inputs = batch[0].to(device)  # a copy from pageable memory would wait for what is to lag behind
            default_loss(model, (inputs,)).backward()
            model.eval()
            if device.type == "cuda":
                # The device lags behind: its uploads of weights come after the host could have updated them.
                torch.cuda._sleep(100_000_000)
            with torch.no_grad():
                outputs.append(model(inputs))
            model.train()
            optimizer.step()
            optimizer.zero_grad()
        return outputs

    same_as_plain(run, device)


@pytest.mark.parametrize("retain", [False, True])
def test_several_backwards_of_one_forward(retain: bool, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer) -> dict[str, Tensor]:
        torch.manual_seed(1)
        for batch in batches(2):
            if retain:  # the whole graph again
                loss = default_loss(model, batch)
                loss.backward(retain_graph=True)
                (loss * 0.5).backward(retain_graph=True)
                loss.backward()
            else:  # two graphs, the older one last
                first, second = default_loss(model, batch), default_loss(model, (batch[0].flip(1),))
                second.backward()
                first.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return states(model, optimizer)

    plain = make()
    expected = run(*prepare_plain(plain, adamw(plain), device=device, dtype=torch.bfloat16))
    for spec in (*FEW_PLANS, Spec("none", "least", (SWAP,), packed=True)):
        model = make()
        options: dict[str, Any] = {"dtype": torch.bfloat16, "accumulation": 3}
        found = run(*wrap_under(spec, model, adamw(model), batches()[0], device=device, **options))
        assert_same(found, expected)
