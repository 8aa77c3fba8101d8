"""``wrap`` without an example batch: the model is profiled and planned in its first call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import CheckpointError, MisuseError, PlanError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import Loop, adamw, assert_same, plain_run, states
from tests.engine.residual import batches, make

LOOP = Loop(scheduler=False)


def wrapped(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, ProTrainOptimizer]:
    """The model, wrapped within a budget that its states do not fit."""
    model = make() if model is None else model
    options = {"device": "cpu", "device_memory": "160KiB", "progress": False, **options}
    return protrain.wrap(model, adamw(model), **options)


def goes_on(model: nn.Module, optimizer: ProTrainOptimizer) -> bool:
    """Whether the training has the bits of the plain loop from its first step on."""
    losses, final = plain_run(make, batches(3), run=LOOP.run)
    found = LOOP.run(model, optimizer, batches(3))
    assert_same(states(model, optimizer), final)
    return bool(found == losses)


def test_the_usual_loop_may_begin_before_there_is_a_plan() -> None:
    model, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 0
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does when it prepares an optimizer
    assert_same(dict(model.state_dict()), dict(make().state_dict()))
    assert goes_on(model, optimizer)
    scheduler.step()
    assert optimizer.plan.n_persist < optimizer.plan.n_chunks, "something must be offloaded"
    assert optimizer.plan.counts == wrapped(example_batch=batches(1)[0])[1].plan.counts


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_cannot_be_the_first_call(context: Callable[[], Any]) -> None:
    model, optimizer = wrapped()
    with context(), pytest.raises(MisuseError, match="pass example_batch to "):
        model(*batches()[0])
    with pytest.raises(MisuseError, match="copy it before"):
        copy.deepcopy(model)
    assert goes_on(model, optimizer)


def test_what_needs_a_plan_or_chunks_says_that_the_model_must_be_called_first() -> None:
    model, optimizer = wrapped()
    asked: tuple[Callable[[], Any], ...] = (
        lambda: optimizer.plan,
        optimizer.report,
        optimizer.step,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.export_parameter("leave.weight"),
        lambda: next(optimizer.export_parts(["leave.weight"])),
    )
    for ask in asked:
        with pytest.raises(MisuseError, match="there is no plan before the first call"):
            ask()
    for ask in (lambda: protrain.full_state_dict(model), protrain.AveragedWeights(model).update):
        with pytest.raises(ValueError, match="without example_batch must be called on a training batch first"):
            ask()


def test_what_does_not_fit_is_an_error_of_the_first_call_and_nothing_is_lost() -> None:
    model, optimizer = wrapped()
    for _ in range(2):
        with pytest.raises(PlanError):
            model(torch.randn(1 << 16, 8))
    assert goes_on(model, optimizer)


def test_a_checkpoint_that_is_gone_by_the_first_call_stops_the_training(tmp_path: Path) -> None:
    begun = wrapped()
    LOOP.run(*begun, batches(1))
    save = protrain.save_checkpoint(tmp_path, *begun)
    model, optimizer = wrapped()
    protrain.load_checkpoint(tmp_path, model, optimizer)
    for file in save.glob("state-*"):
        file.unlink()
    with pytest.raises((CheckpointError, OSError)):
        model(*batches(1)[0])
    with pytest.raises(MisuseError, match="an earlier first call of this model failed after its weights had moved"):
        model(*batches(1)[0])


def test_the_first_call_may_be_under_autocast() -> None:
    found = []
    for memory in ("160KiB", "1GiB"):
        model, optimizer = wrapped(device_memory=memory, dtype="bfloat16")
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(*batches(1)[0]).float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(states(model, optimizer) | {"loss": loss.detach()})
    assert_same(*found)
