"""Forwards that write into what they are given: a dictionary of features, or the tensors of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.engine import residual
from tests.engine.harness import FEW_PLANS, Batch, Loop, adamw, check_equal_to_plain, seeded, wrap_under

WIDTH = 16


class Encoder(nn.Module):
    """Writes into its dictionary and takes from there what somebody has computed before, as sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(residual.Block(WIDTH) for _ in range(3))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        if "embedded" not in features:
            features["embedded"] = self.embedding(features["ids"])
        hidden = features["embedded"]
        for layer in self.layers:
            hidden = layer(hidden)
        features["sentence"] = hidden.mean(1)
        return features


class Shifted(residual.Model):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1))


def encoder() -> nn.Module:
    with seeded():
        return Encoder()


def sentences(seed: int) -> Batch:
    return ({"ids": torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))},)


def of_a_fresh_dictionary(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(dict(batch[0]))["sentence"].square().mean()
    return loss


def test_features_that_are_written_and_read_train_as_in_the_plain_loop(device: torch.device) -> None:
    check_equal_to_plain(
        encoder, [sentences(seed) for seed in range(2)], device=device, loop=Loop(loss=of_a_fresh_dictionary)
    )


def test_the_callers_dictionary_has_what_the_model_wrote() -> None:
    """And the one that was the example has not: the model ran on it several times before the training began."""
    example, features = sentences(0), sentences(1)
    model = encoder()
    with seeded(1):
        expected = model.train()(dict(features[0]))
    wrapped, _ = wrap_under(FEW_PLANS[0], model, adamw(model), example, device=torch.device("cpu"))
    assert example[0].keys() == {"ids"}
    with seeded(1):
        returned = wrapped(features[0])
    assert features[0].keys() == expected.keys()
    for name, value in expected.items():
        assert features[0][name] is returned[name]
        assert torch.equal(returned[name], value)


def test_only_arguments_that_are_cast_are_copied() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, features: Any, images: Any) -> Any:
            images["seen"] = images["pixels"].mean()
            return self.encoder(features)

    model = Two()
    batch = (*sentences(0), {"pixels": torch.ones(2)})
    wrapped, _ = protrain.wrap(
        model, adamw(model), example_batch=batch, device="cpu", dtype=torch.bfloat16, progress=False
    )
    wrapped(*batch)
    assert batch[0].keys() == {"ids", "embedded", "sentence"}
    assert batch[1].keys() == {"pixels"}, "the model had bfloat16 pixels, in a dictionary of its own"


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_example_batch_keeps_its_values(requires_grad: bool) -> None:
    class Scaled(Shifted):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 1 if x.requires_grad else x)

    with seeded():
        model = Scaled()
    (data,) = residual.batches(1)[0]
    example = data.clone().requires_grad_(requires_grad)
    protrain.wrap(model, adamw(model), example_batch=(example,), device="cpu", progress=False)
    assert torch.equal(example, data)
    assert example.grad is None


def test_inputs_changed_in_place_train_as_in_the_plain_loop(device: torch.device) -> None:
    def make() -> nn.Module:
        with seeded():
            return Shifted()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].clone().to(device)
        loss: Tensor = model(x).square().mean()
        assert torch.equal(x, batch[0].to(device) + 1), "the caller sees the change"
        return loss

    check_equal_to_plain(make, residual.batches(2), device=device, loop=Loop(loss=loss))
