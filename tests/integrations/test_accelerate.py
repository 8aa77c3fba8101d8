"""A loop of Accelerate whose model and optimizer ProTrain wraps trains, saves and goes on as it does without it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protrain import CheckpointError
from tests.distributed.pool import on_ranks
from tests.engine.harness import assert_same
from tests.integrations.clients import forget_precision
from tests.integrations.lightning_runs import Run, assert_close, loader, network
from tests.integrations.test_lightning_checkpoints import refuse_gathering

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow
BATCHES, HALF = 6, 4


class Loop:
    """Accumulation over two batches, clipping, a scheduler, and an object of its own that Accelerate saves."""

    def __init__(self, *, on_protrain: bool = True, example: bool = False) -> None:
        from protrain.integrations.accelerate import wrap

        forget_precision()
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = network()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if on_protrain:
            arguments = {"example_batch": next(iter(loader()))[0]} if example else {}
            model, optimizer = wrap(
                self.accelerator, model, optimizer, device_memory="0.3MiB", progress=False, **arguments
            )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.model, self.optimizer, self.scheduler, self.batches = self.accelerator.prepare(
            model, optimizer, scheduler, loader()
        )
        self.accelerator.register_for_checkpointing(self)
        self.number = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]

    def train(self, until: int) -> None:
        for rows, target in self.accelerator.skip_first_batches(self.batches, self.number):
            with self.accelerator.accumulate(self.model):
                loss = F.mse_loss(self.model(rows), target)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
            self.number += 1
            if self.number == until:
                return

    def run(self) -> Run:
        """What the loop has done. Accelerate's own wrapper for several processes adds to names."""
        weights = self.accelerator.get_state_dict(self.model)
        return Run(self.losses, {name.removeprefix("module."): value.clone() for name, value in weights.items()})


@contextmanager
def no_gathering() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        refuse_gathering(monkeypatch)
        yield


def plain_whole_and_resumed(rank: int, folder: Path, example: bool) -> tuple[Run, Run, Run]:
    """A loop without ProTrain, one with it that saves half way, and one that goes on from there."""
    plain, whole = Loop(on_protrain=False), Loop(example=example)
    plain.train(BATCHES)
    whole.train(HALF)
    with no_gathering():
        assert whole.accelerator.save_state(str(folder / "ours")) == folder / "ours"
    assert whole.optimizer.state_dict()["state"]  # of which direct use is as it was
    whole.train(BATCHES)
    resumed = Loop(example=example)
    with no_gathering():
        resumed.accelerator.load_state(str(folder / "ours"))
    assert resumed.number == HALF
    resumed.train(BATCHES)
    assert resumed.optimizer.step_was_skipped is False
    return plain.run(), whole.run(), resumed.run()


def assert_goes_on(plain: Run, whole: Run, resumed: Run) -> None:
    """As without ProTrain, and with the same bits whether it was interrupted or not."""
    assert_close(whole, plain)
    assert resumed.losses == whole.losses[HALF:]
    assert_same(resumed.weights, whole.weights)


@pytest.mark.parametrize("example", [False, True])
def test_a_loop_trains_as_without_protrain_and_goes_on(tmp_path: Path, example: bool) -> None:
    plain, whole, resumed = plain_whole_and_resumed(0, tmp_path, example)
    assert_goes_on(plain, whole, resumed)
    assert not list((tmp_path / "ours").glob("*.safetensors"))
    assert not (tmp_path / "ours" / "optimizer.bin").exists()


def test_two_processes(tmp_path: Path) -> None:
    """Accelerate splits the batches, and would put DistributedDataParallel around the model."""
    for plain, whole, resumed in on_ranks(2, plain_whole_and_resumed, tmp_path, False):
        assert_goes_on(plain, whole, resumed)
    [save] = (tmp_path / "ours" / "protrain").glob("*-step-2")
    assert len(list(save.glob("state-*"))) == 2  # each rank has written its own


def test_a_state_is_replaced_in_its_folder(tmp_path: Path) -> None:
    loop = Loop()
    for until in (2, 4):
        loop.train(until)
        loop.accelerator.save_state(str(tmp_path))
    assert [each.name for each in (tmp_path / "protrain").glob("*-step-*")] == ["00002-step-2"]
    loop.train(BATCHES)
    loop.accelerator.load_state(str(tmp_path))
    assert loop.number == 4


def test_two_models_of_one_accelerator_have_folders_of_their_own(tmp_path: Path) -> None:
    from protrain.integrations.accelerate import wrap

    loop = Loop(example=True)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
    batch = next(iter(loader()))[0]
    second, optimizer = wrap(loop.accelerator, plain, torch.optim.AdamW(plain.parameters()), example_batch=batch)
    second, optimizer = loop.accelerator.prepare(second, optimizer)
    want = {name: value.clone() for name, value in second.state_dict().items()}
    loop.accelerator.save_state(str(tmp_path))
    loop.accelerator.backward(second(batch).sum())
    optimizer.step()
    loop.accelerator.load_state(str(tmp_path))
    assert_same(dict(second.state_dict()), want)


def test_a_torn_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tear(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    loop = Loop()
    loop.train(2)
    with monkeypatch.context() as torn:
        torn.setattr("protrain.integrations.accelerate.save_checkpoint", tear)
        with pytest.raises(KeyboardInterrupt):
            loop.accelerator.save_state(str(tmp_path / "new"))
    with pytest.raises(CheckpointError, match="does not exist"):
        loop.accelerator.load_state(str(tmp_path / "new"))
    loop.accelerator.save_state(str(tmp_path / "old"))
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    loop.train(4)
    with monkeypatch.context() as torn:
        torn.setattr("accelerate.accelerator.save_accelerator_state", tear)
        with pytest.raises(KeyboardInterrupt):
            loop.accelerator.save_state(str(tmp_path / "old"))
    with pytest.raises(CheckpointError, match="was not saved to its end"):
        loop.accelerator.load_state(str(tmp_path / "old"))
    loop.accelerator.load_state(str(tmp_path / "copy"))
    os.unlink(next((tmp_path / "copy" / "protrain").glob("*/state-*")))
    with pytest.raises(CheckpointError, match="is missing"):
        loop.accelerator.load_state(str(tmp_path / "copy"))
