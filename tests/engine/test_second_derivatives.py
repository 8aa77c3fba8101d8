"""Gradients of gradients (``create_graph=True``) have the plain loop's bits, wherever the weights are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import BudgetError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    FEW_PLANS,
    NONE,
    PLANS,
    Batch,
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


def of_inputs(model: nn.Module, batch: Batch) -> Tensor:
    """The loss, and a penalty on its gradient with respect to the inputs."""
    x = batch[0].clone().requires_grad_()
    loss = default_loss(model, (x,))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def of_parameters(model: nn.Module, batch: Batch) -> Tensor:
    loss = default_loss(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()


def of_one_parameter(model: nn.Module, batch: Batch) -> Tensor:
    """A plain first derivative, without a graph."""
    weight = model.get_parameter("blocks.2.first.weight")
    (gradient,) = torch.autograd.grad(default_loss(model, batch), weight)
    return default_loss(model, batch) * (1 + gradient.abs().sum())


@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 0), (torch.bfloat16, 1)])
@pytest.mark.parametrize("loss", [of_inputs, of_parameters, of_one_parameter])
def test_gradients_of_gradients(
    loss: Callable[[nn.Module, Batch], Tensor], dtype: torch.dtype, part: int, device: torch.device
) -> None:
    leave_device_thread_behind(device)
    specs = FEW_PLANS[part::2] if device.type == "cpu" else PLANS
    check_equal_to_plain(make, batches(2), loop=Loop(loss=loss), device=device, dtype=dtype, specs=specs)


def leave_device_thread_behind(device: torch.device) -> None:
    """Have this thread number its operations far above those of the thread that runs a GPU's backward.

    Backward goes through a graph by these numbers, and a gradient of three terms has other bits in another order. Each
    thread counts for itself, so which of the two is ahead hangs on what ran in a process before, without us as well.
    """
    if device.type == "cuda":
        count_up()


def count_up() -> None:
    """This thread numbers its next operation above 50,000."""
    ours = torch.zeros((), requires_grad=True)
    for _ in range(50_000):
        ours * 1.0


def test_weights_that_they_hold_are_counted() -> None:
    def wrapped(*, tight: bool) -> tuple[nn.Module, ProTrainOptimizer]:
        model = make(width=128)
        spec = Spec("none", "least", (NONE,))
        return wrap_under(spec, model, adamw(model), batches(1)[0], device=torch.device("cpu"), tight=tight)

    model, optimizer = wrapped(tight=True)
    with pytest.raises(BudgetError, match=r"simulated device is full.*allow more device_memory"):
        of_inputs(model, batches(1)[0])
    optimizer.zero_grad()
    untouched = wrapped(tight=False)
    assert Loop().run(model, optimizer, batches(3)) == Loop().run(*untouched, batches(3))
    assert_same(states(model, optimizer), states(*untouched))
