"""Scripts that train several models: two encoders, an actor and its critic, agents without a forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import Batch, Loop, LossOf, adamw, check_equal_to_plain
from tests.engine.residual import Model, batches, make


class Pair(nn.Module):
    """Two models that one optimizer trains, and a parameter of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Model(24, 3), Model(24, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.compare(x)

    def compare(self, x: Tensor) -> Tensor:
        return ((self.first(x) - self.second(x.flip(0))) * self.scale).square().mean()


def _pair() -> nn.Module:
    torch.manual_seed(0)
    return Pair()


def _of_method(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, Pair)
    return model.compare(*batch)


def _of_parts(model: nn.Module, batch: Batch) -> Tensor:
    (x,) = batch
    first, second = model.get_submodule("first"), model.get_submodule("second")
    with torch.no_grad():
        target = second(x)
    return (first(x) - target).square().mean() + (second(x.flip(0)) * model.get_parameter("scale")).square().mean()


@pytest.mark.parametrize("loss", [_of_method, _of_parts])
def test_methods_and_parts_of_a_wrapped_module_train_as_in_the_plain_loop(loss: LossOf, device: torch.device) -> None:
    on_device = [(x.to(device),) for (x,) in batches(4)]  # as only forward of the whole module moves its inputs
    check_equal_to_plain(_pair, on_device, device=device, loop=Loop(loss=loss, max_norm=0.5))


def test_a_step_before_the_model_itself_was_called_says_so() -> None:
    pair = _pair()
    pair, optimizer = protrain.wrap(pair, adamw(pair), device="cpu", progress=False)
    _of_method(pair, batches(1)[0]).backward()
    with pytest.raises(MisuseError, match="call the model itself, and not a method or part of it, on a training batch"):
        optimizer.step()


def test_one_optimizer_of_two_models_is_told_to_wrap_both() -> None:
    first, second = make(), make()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    with pytest.raises(ValueError, match="if it trains several models, wrap one module that holds them all"):
        protrain.wrap(first, optimizer, example_batch=batches(1)[0], device="cpu", progress=False)


def test_a_model_that_shares_a_part_with_a_wrapped_one_is_told_to_wrap_both() -> None:
    actor, critic = nn.Sequential(make(), nn.Linear(4, 2)), nn.Sequential(nn.Identity(), nn.Linear(4, 1))
    critic[0] = actor[0]
    protrain.wrap(actor, adamw(actor), example_batch=batches(1)[0], device="cpu", progress=False)
    with pytest.raises(
        ValueError, match=r"0\.enter\.weight belongs to a wrapped model.*share parameters are wrapped as one"
    ):
        protrain.wrap(critic, adamw(critic), example_batch=batches(1)[0], device="cpu", progress=False)
