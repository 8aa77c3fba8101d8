"""Models that compute gradients in their forward (forces, physics-informed losses) have the plain loop's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import BudgetError
from tests.engine import residual
from tests.engine.harness import FEW_PLANS, Batch, Spec, check_equal_to_plain, default_loss, unharmed
from tests.engine.residual import Block, Model, batches

MODES = [Spec("none", "least", mode, small=True) for mode in "ncsi"]
MODES.append(Spec("none", "least", "s", small=True, packed=True))


class Forces(Model):
    """An energy and its gradient with respect to the inputs, which is trained too."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).square().sum()
        (forces,) = torch.autograd.grad(energy, [x], create_graph=True)
        return torch.cat([energy[None], forces.flatten()])


class OfParameters(Model):
    """A penalty on the gradients of parameters."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x).square().mean()
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()


class Head(nn.Module):
    """Has weights of its own, which are there while the backward of all blocks runs."""

    def __init__(self, width: int, *, graph: bool) -> None:
        super().__init__()
        self.graph = graph
        self.inner, self.out = nn.Parameter(torch.eye(width)), nn.Linear(width, 1)

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        energy = self.out(torch.tanh(hidden @ self.inner)).sum()
        (forces,) = torch.autograd.grad(energy, [x], create_graph=self.graph, retain_graph=True)
        return energy + forces.square().sum()


class WithHead(Model):
    def __init__(self, *, graph: bool) -> None:
        super().__init__(48, 4)
        del self.leave
        self.head = Head(48, graph=graph)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden, x)


class OwnGradient(Block):
    """A block that computes the gradient of an energy of its own, with respect to its input or a copy."""

    def __init__(self, width: int, *, copy: bool, graph: bool) -> None:
        super().__init__(width)
        self.copy, self.graph = copy, graph

    def forward(self, x: Tensor) -> Tensor:
        given = x.detach().requires_grad_() if self.copy else x
        hidden = self.drop(torch.tanh(self.first(self.norm(given))))
        (gradient,) = torch.autograd.grad(self.second(hidden).square().sum(), [given], create_graph=self.graph)
        self.aside = self.second(torch.tanh(gradient))  # holds the graph of the last run
        return x + gradient + self.aside


class Through(Block):
    """A block whose gradient goes through the blocks before it."""

    start: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        (gradient,) = torch.autograd.grad(out.sum(), [self.start], retain_graph=True)
        return out + gradient.sum()


class Throughs(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            block.start = x
        return super().forward(x)


# Of blocks that compute gradients every mode meets a copy and none, a graph and none, in one half of the combinations.
OWN = [*MODES, Spec("all", "least", "c")]
MODELS: dict[str, tuple[Callable[[], nn.Module], Sequence[Spec]]] = {
    "forces": (partial(Forces, 48, 4), FEW_PLANS),
    "of parameters": (partial(OfParameters, 48, 3), FEW_PLANS),
    "in the head": (partial(WithHead, graph=True), FEW_PLANS),
    # The head holds its weights while the backward that it runs needs those of the blocks.
    "in the head without a graph": (partial(WithHead, graph=False), MODES),
    **{
        f"in blocks, {copy=}, {graph=}": (partial(Model, 48, 4, partial(OwnGradient, copy=copy, graph=graph)), specs)
        for copy, graph, specs in (
            *((False, False, OWN[::2]), (True, True, OWN[::2])),
            *((False, True, OWN[1::2]), (True, False, OWN[1::2])),
        )
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_bits(name: str, device: torch.device) -> None:
    leave_device_thread_behind(device)
    make, specs = MODELS[name]
    check_equal_to_plain(make, batches(2), device=device, specs=specs)


def test_blocks_that_compute_gradients_through_others_are_refused() -> None:
    model = Throughs(48, 4, Through)
    with pytest.raises(ValueError, match=r"blocks\.1 computes gradients through blocks\.0.*torch\.autograd\.grad"):
        protrain.profile(model, batches(1)[0], device="cpu")


def of_inputs(model: nn.Module, batch: Batch) -> Tensor:
    """The loss, and a penalty on its gradient with respect to the inputs."""
    x = batch[0].clone().requires_grad_()
    loss = default_loss(model, (x,))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def leave_device_thread_behind(device: torch.device) -> None:
    """Have this thread number its operations far above those of the thread that runs a GPU's backward.

    Backward goes through a graph by these numbers, and a gradient of three terms has other bits in another order. Each
    thread counts for itself, so which of the two is ahead hangs on what ran in a process before, without us as well.
    """
    ours = torch.zeros((), requires_grad=True)
    for _ in range(50_000 if device.type == "cuda" else 0):
        ours * 1.0


def test_weights_that_they_hold_are_counted() -> None:
    spec, data = Spec("none", "least", "n"), batches(3)
    with unharmed(spec, partial(residual.make, 128), data, tight=True) as (model, optimizer):
        with pytest.raises(BudgetError, match=r"simulated device is full.*allow more device_memory"):
            of_inputs(model, data[0])
        optimizer.zero_grad()
