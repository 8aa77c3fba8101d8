"""A loop of Accelerate whose model and optimizer ProTrain wraps trains as it does without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.pool import on_ranks
from tests.integrations.clients import forget_precision
from tests.integrations.lightning_runs import loader, network

accelerate = pytest.importorskip("accelerate")

HALF = 4  # batches


@dataclass(frozen=True)
class Run:
    """The losses of a training, and its final weights."""

    losses: list[float]
    weights: dict[str, Tensor]


def run(folder: Path, on_protrain: bool, resume: Path | None = None) -> Run:
    """Accumulation over two batches, clipping, a scheduler, and a state that is saved half way."""
    from protrain.integrations.accelerate import wrap

    forget_precision()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if on_protrain:
        model, optimizer = wrap(accelerator, model, optimizer, device_memory="0.3MiB", progress=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, loader())
    if resume is not None:
        accelerator.load_state(str(resume))
        batches = accelerator.skip_first_batches(batches, HALF)
    losses = []
    for number, (rows, target) in enumerate(batches, start=0 if resume is None else HALF):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(rows), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if number + 1 == HALF:
            accelerator.save_state(str(folder))
    weights = accelerator.get_state_dict(model)
    return Run(losses, {name: value.clone() for name, value in weights.items()})


def run_on_rank(rank: int, folder: Path, on_protrain: bool, resume: Path | None) -> Run:
    return run(folder, on_protrain, resume)


def assert_close(ours: Run, plain: Run) -> None:
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert ours.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert ours.weights[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_a_loop_goes_on_from_a_state_that_was_saved_without_protrain(tmp_path: Path) -> None:
    plain, ours = run(tmp_path / "plain", False), run(tmp_path / "ours", True)
    assert_close(ours, plain)
    resumed = run(tmp_path / "resumed", True, resume=tmp_path / "plain")
    assert_close(resumed, Run(plain.losses[HALF:], plain.weights))


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Accelerate splits the batches, and would put DistributedDataParallel around the model."""

    def two(name: str, on_protrain: bool, resume: Path | None = None) -> list[Run]:
        found: list[Run] = on_ranks(2, run_on_rank, tmp_path / name, on_protrain, resume)
        return found

    plain, ours = two("plain", False), two("ours", True)
    for mine, theirs in zip(ours, plain, strict=True):
        assert_close(mine, Run(theirs.losses, {n.removeprefix("module."): v for n, v in theirs.weights.items()}))
    resumed = two("resumed", True, resume=tmp_path / "ours")
    for mine, whole in zip(resumed, ours, strict=True):
        assert mine.losses == whole.losses[HALF:]
        for name, value in whole.weights.items():
            assert torch.equal(mine.weights[name], value), name
