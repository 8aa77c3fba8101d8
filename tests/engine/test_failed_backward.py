"""A backward that raised in the middle leaves nothing behind for those after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
    Batch,
    Spec,
    Trainer,
    adamw,
    assert_same,
    default_loss,
    seeded,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain
from tests.engine.residual import Block, batches

SPECS = (
    Spec("none", "least", (NONE,)),
    Spec("none", "least", (CKPT,), small=True, speculate=True),
    Spec("some", "least", (SWAP, CKPT), packed=True),
    Spec("all", "least", (NONE,)),
)


class Model(nn.Module):
    """Its output is a product with a weight alone, whose gradient is the first of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 48), nn.Linear(48, 4, bias=False)
        self.blocks = nn.ModuleList(Block(48) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Failure:
    """A hook of a parameter that raises when it is told to."""

    raises = False

    def __call__(self, _: Tensor) -> None:
        if self.raises:
            raise ArithmeticError("backward fails")

    def on_gradient(self, parameter: Tensor) -> None:
        parameter.register_hook(self)

    def on_accumulation(self, parameter: Tensor) -> None:
        parameter.register_post_accumulate_grad_hook(self)


def make() -> Model:
    with seeded():
        return Model()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    with seeded():  # a plain model is called once less
        return default_loss(model, batch)


def plain_step(device: torch.device) -> dict[str, Tensor]:
    model = make()
    trained, optimizer = prepare_plain(model, adamw(model), device=device, dtype=torch.float32)
    loss_of(trained, batches()[1]).backward()
    optimizer.step()
    return states(trained, optimizer)


@pytest.mark.parametrize("at", ["leave.weight", "blocks.1.first.weight"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_another_backward_at_once(spec: Spec, at: str, device: torch.device) -> None:
    """It adds to what the one that raised has brought, the gradients of the unit in whose middle that was included."""

    def run(model: nn.Module, optimizer: Trainer, failure: Failure) -> dict[str, Tensor]:
        first, second = loss_of(model, batches()[0]), loss_of(model, batches()[1])
        failure.raises = True
        with pytest.raises(ArithmeticError, match="backward fails"):
            first.backward()
        failure.raises = False
        second.backward()
        optimizer.step()
        return states(model, optimizer)

    def failing() -> tuple[nn.Module, Failure]:
        model, failure = make(), Failure()
        failure.on_gradient(model.get_parameter(at))
        return model, failure

    model, failure = failing()
    expected = run(*prepare_plain(model, adamw(model), device=device, dtype=torch.float32), failure)
    model, failure = failing()
    wrapped = wrap_under(spec, model, adamw(model), batches()[0], device=device, accumulation=2)
    assert_same(run(*wrapped, failure), expected)


@pytest.mark.parametrize("same_graph", [False, True], ids=["new-forward", "same-graph"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_same_backward_once_more(spec: Spec, device: torch.device, same_graph: bool) -> None:
    """Also where the user's hook came before that of the engine, which then has not taken the gradient."""
    model, failure = make(), Failure()
    failure.on_accumulation(model.leave.weight)
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device)
    loss = loss_of(wrapped, batches()[1])
    failure.raises = True
    with pytest.raises(ArithmeticError, match="backward fails"):
        loss.backward(retain_graph=True)
    failure.raises = False
    optimizer.zero_grad()
    if not same_graph:
        loss = loss_of(wrapped, batches()[1])
    loss.backward()
    optimizer.step()
    assert_same(states(wrapped, optimizer), plain_step(device))


def test_a_backward_that_is_refused_leaves_nothing(device: torch.device) -> None:
    """float16: the loss must be scaled; what the unscaled one brought is not added to the next."""

    def run(*, refused: bool) -> dict[str, Tensor]:
        model = make()
        wrapped, optimizer = wrap_under(SPECS[0], model, adamw(model), batches()[0], device=device, dtype=torch.float16)
        loss = loss_of(wrapped, batches()[1])
        if refused:
            with pytest.raises(MisuseError, match="float16 needs a scaled loss"):
                loss.backward(retain_graph=True)
        optimizer.backward(loss)
        optimizer.step()
        return states(wrapped, optimizer)

    assert_same(run(refused=True), run(refused=False))
