"""``wrap`` without an example batch: the model is profiled and planned in its first call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.common.errors import CheckpointError, MisuseError, PlanError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import assert_same
from tests.engine.plain_loop import prepare_plain

STEPS, ROWS, WIDTH = 4, 4, 16


class Net(nn.Module):
    """Three residual blocks with dropout, a head, and a loss if it is given labels."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None, *, factor: float = 1.0) -> torch.Tensor:
        """The loss, or the logits if there are no labels."""
        if self.training:
            self.calls.add_(1)
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(hidden)
        if labels is None:
            return logits
        return factor * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches() -> list[torch.Tensor]:
    """Token ids of every step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (ROWS, 8), generator=generator) for _ in range(STEPS)]


def made(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """The model and a plain optimizer, with a seed for the dropout that follows."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    return model, optimizer


def wrapped(**options: Any) -> tuple[Net, ProTrainOptimizer]:
    """The model, wrapped within a budget that its states do not fit."""
    model, optimizer = made()
    return protrain.wrap(model, optimizer, device="cpu", device_memory="80KiB", progress=False, **options)


def train(model: nn.Module, optimizer: Any, given: list[torch.Tensor]) -> list[float]:
    """The losses of plain training."""
    losses = []
    for ids in given:
        loss = model(ids, labels=ids, factor=0.5)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def plainly_trained() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of the plain loop."""
    model, optimizer = made()
    model, plain = prepare_plain(model, optimizer, device=torch.device("cpu"), dtype=torch.float32)
    torch.manual_seed(7)
    return train(model, plain, batches()), weights(model)


def test_the_bits_are_those_of_the_plain_loop_and_of_a_wrap_with_a_batch() -> None:
    expected, expected_weights = plainly_trained()
    first = batches()[0]
    with_batch = wrapped(example_batch={"ids": first, "labels": first, "factor": 0.5})
    without = wrapped()
    for pair in (with_batch, without):
        torch.manual_seed(7)
        assert train(*pair, batches()) == expected
        assert_same(weights(pair[0]), expected_weights)
    assert without[1].plan.n_persist < without[1].plan.n_chunks, "something must be offloaded"
    assert without[1].plan.counts == with_batch[1].plan.counts


def test_the_usual_loop_may_begin_before_there_is_a_plan() -> None:
    expected, _ = plainly_trained()
    model, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 0
    assert optimizer.param_groups[0]["lr"] == 1e-2
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does when it prepares an optimizer
    assert_same(weights(model), weights(made()[0]))
    torch.manual_seed(7)
    assert train(model, optimizer, batches()) == expected
    scheduler.step()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_cannot_be_the_first_call(context: Callable[[], Any]) -> None:
    model, optimizer = wrapped()
    with context(), pytest.raises(MisuseError, match="pass example_batch to "):
        model(batches()[0])
    with pytest.raises(MisuseError, match="copy it before"):
        copy.deepcopy(model)
    torch.manual_seed(7)
    assert train(model, optimizer, batches()) == plainly_trained()[0], "nothing is lost"


@pytest.mark.parametrize(
    "asked",
    [
        lambda optimizer: optimizer.plan,
        lambda optimizer: optimizer.report(),
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.clip_grad_norm_(1.0),
        lambda optimizer: optimizer.export_parameter("head.weight"),
        lambda optimizer: next(optimizer.export_parts(["head.weight"])),
    ],
)
def test_what_needs_a_plan_says_that_there_is_none(asked: Callable[[ProTrainOptimizer], Any]) -> None:
    _, optimizer = wrapped()
    with pytest.raises(MisuseError, match="there is no plan before the first call"):
        asked(optimizer)


@pytest.mark.parametrize("asked", [protrain.full_state_dict, lambda model: protrain.AveragedWeights(model).update()])
def test_what_needs_chunks_says_that_the_model_must_be_called_first(asked: Callable[[nn.Module], Any]) -> None:
    model, _ = wrapped()
    with pytest.raises(ValueError, match="without example_batch must be called on a training batch first"):
        asked(model)


def test_what_does_not_fit_is_an_error_of_the_first_call_and_nothing_is_lost(tmp_path: Path) -> None:
    """Neither the weights, nor the checkpoint that the first call is to read."""
    begun, (model, optimizer) = wrapped(), wrapped()
    torch.manual_seed(7)
    train(*begun, batches()[:2])
    protrain.save_checkpoint(tmp_path, *begun)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    large = torch.randint(32, (4096, 8))
    for _ in range(2):
        with pytest.raises(PlanError):
            model(large, labels=large)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    assert train(model, optimizer, batches()[2:]) == plainly_trained()[0][2:]


def test_a_checkpoint_that_is_gone_by_the_first_call_stops_the_training(tmp_path: Path) -> None:
    begun = wrapped()
    train(*begun, batches()[:1])
    save = protrain.save_checkpoint(tmp_path, *begun)
    model, optimizer = wrapped()
    protrain.load_checkpoint(tmp_path, model, optimizer)
    for file in save.glob("state-*"):
        file.unlink()
    with pytest.raises((CheckpointError, OSError)):
        train(model, optimizer, batches())
    with pytest.raises(MisuseError, match="an earlier first call of this model failed after its weights had moved"):
        train(model, optimizer, batches())


def test_the_first_call_may_be_under_autocast() -> None:
    found = []
    for memory in ("80KiB", "1GiB"):
        model, optimizer = made()
        options: dict[str, Any] = {"device": "cpu", "device_memory": memory, "dtype": "bfloat16", "progress": False}
        model, trainer = protrain.wrap(model, optimizer, **options)
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batches()[0], labels=batches()[0])
        loss.backward()
        trainer.step()
        found.append(weights(model) | {"loss": loss.detach()})
    assert_same(*found)


def test_what_was_frozen_in_wrap_cannot_be_trained_from_the_first_call_on() -> None:
    model, optimizer = made()
    model.blocks[1].requires_grad_(False)
    model, trainer = protrain.wrap(model, optimizer, device="cpu", device_memory="80KiB", progress=False)
    model.requires_grad_(True)
    with pytest.raises(MisuseError, match=r"blocks\.1\.0\.weight was frozen when the model was wrapped, so it has no"):
        train(model, trainer, batches())
    model.blocks[1].requires_grad_(False)
    assert len(train(model, trainer, batches())) == STEPS
