"""What stands in .grad, and hooks behind it: norms and factors, or an error that names the remedy.

Random scripts clip by torch's own functions, multiply gradients, drop them, and have such hooks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from protrain.common.errors import MisuseError
from tests.engine.harness import FEW_PLANS, Spec, adamw, default_loss, wrap_under
from tests.engine.residual import Model, batches, make, wrapped

OFFLOADED = Spec("none", "least", "c")
RESIDENT = Spec("all", "least", "n")


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_each_norm_is_that_of_the_gradient(spec: Spec, device: torch.device) -> None:
    plain = make().to(device)
    torch.manual_seed(1)
    default_loss(plain, tuple(value.to(device) for value in batches()[0])).backward()
    model, optimizer = wrapped(spec, device=device)
    torch.manual_seed(1)
    default_loss(model, batches()[0]).backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.shape == parameter.shape
        assert gradient.dtype == parameter.dtype
        assert gradient.device == parameter.device
        assert name in repr(gradient)
        norms = [gradient.norm(), gradient.norm(2), torch.norm(gradient), torch.linalg.vector_norm(gradient)]
        norms += [gradient.detach().data.norm(2.0), torch.linalg.norm(gradient)]
        norms += [torch.linalg.norm(gradient, 2 if gradient.dim() == 1 else "fro")]
        for norm in norms:
            torch.testing.assert_close(norm, expected.grad.norm(), rtol=1e-5, atol=1e-8)
        assert torch.linalg.vector_norm(gradient, 2.0, dtype=torch.float64).dtype is torch.float64
    optimizer.clip_grad_norm_(0.01)
    clipped = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(float(clipped.norm()), 0.01, rtol=1e-4, atol=0)
    optimizer.step()


def test_gradients_of_others_are_clipped_with_them(device: torch.device) -> None:
    model, optimizer = wrapped(OFFLOADED, device=device, dtype=torch.bfloat16)
    other = nn.Parameter(torch.ones(3, device=device))
    default_loss(model, batches()[0]).backward()
    (other * torch.tensor([3.0, 0.0, 4.0], device=device)).sum().backward()
    alone = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    norm = torch.nn.utils.clip_grad_norm_([*model.parameters(), other], 1.0)
    torch.testing.assert_close(float(norm), (alone**2 + 25) ** 0.5, rtol=1e-5, atol=0)
    assert other.grad is not None
    torch.testing.assert_close(float(other.grad.norm()), 5 / float(norm), rtol=1e-4, atol=0)
    left = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(left, alone / float(norm), rtol=1e-4, atol=0)
    optimizer.step()


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda g: g.zero_(),
    "add": lambda g: g + 1,
    "norm": lambda g: g.norm(1),
    "mul_": lambda g: g.mul_(torch.ones(g.shape)),
    "clamp_": lambda g: torch.nn.utils.clip_grad_value_([g], 1.0) or g.clamp_(-1, 1),
    "data": lambda g: g.data.zero_(),
    "numbers": lambda g: g.detach().tolist(),
    "array": lambda g: g.detach().numpy(),
    "copy": copy.deepcopy,
    "norm of a matrix": lambda g: torch.linalg.norm(g, 2 if g.dim() == 2 else "fro"),
    "factors": lambda g: torch._foreach_mul_([g], [0.5]),
    "foreach": lambda g: torch._foreach_add_([g], 1.0),
    "unscale": lambda g: torch._amp_foreach_non_finite_check_and_unscale_([g], torch.zeros(1), torch.ones(1)),
}


def test_anything_else_names_the_parameter_and_the_remedy(device: torch.device) -> None:
    model, optimizer = wrapped(OFFLOADED, device=device, dtype=torch.bfloat16)
    default_loss(model, batches()[0]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for operation, operate in OPERATIONS.items():
            with pytest.raises(MisuseError) as raised:
                operate(parameter.grad)
            words = rf"gradient of {name} is kept.*optimizer\.zero_grad\(\)"
            assert re.search(words, str(raised.value)), operation
    optimizer.step()


def test_a_gradient_that_is_used_up_has_no_norm(device: torch.device) -> None:
    model, optimizer = wrapped(OFFLOADED, device=device, dtype=torch.bfloat16)
    parameter = next(model.parameters())
    default_loss(model, batches()[0]).backward()
    gradient = parameter.grad
    assert gradient is not None
    optimizer.step()
    optimizer.zero_grad()
    assert parameter.grad is None
    for use in (gradient.norm, lambda: gradient.mul_(0.5)):
        with pytest.raises(MisuseError, match=r"without the gradient of .*: call loss\.backward\(\) first"):
            use()
    with pytest.raises(MisuseError, match="cannot be assigned"):
        parameter.grad = gradient


# -- hooks of register_post_accumulate_grad_hook -----------------------------------------------------------------------


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


class Repeating(Model):
    """A block is called twice, perhaps in reentrant checkpoints."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return self.leave(x)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("spec", [RESIDENT, *FEW_PLANS[:2]], ids=str)
def test_sums_inside_one_backward_are_refused_where_the_hook_wants_them(spec: Spec, writes: bool) -> None:
    """A reentrant checkpoint is a backward inside the backward: torch calls the hook after each."""
    model = Repeating(16, 3)
    trained, _ = wrap_under(spec, model, adamw(model), batches()[0])
    model.reentrant, name, calls = True, "blocks.0.first.weight", []

    def hook(parameter: Tensor) -> None:
        calls.append(parameter)
        if writes:
            parameter.grad = torch.zeros_like(parameter)
        else:
            clamp(parameter)

    trained.get_parameter(name).register_post_accumulate_grad_hook(hook)
    refused = f"^{name} has a hook .*register_post_accumulate_grad_hook.*earlier backward.*in a tensor hook"
    with pytest.raises(MisuseError, match=refused):
        default_loss(trained, batches()[0]).backward()
    assert len(calls) == 2
