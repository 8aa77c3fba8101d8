"""Checkpoints of Accelerate, whose model and optimizer each rank saves for itself."""

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

from tests.distributed.pool import on_ranks
from tests.integrations.clients import forget_precision
from tests.integrations.lightning_runs import loader, network
from tests.integrations.test_lightning_checkpoints import refuse_gathering

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow
BATCHES, HALF = 6, 3


class Loop:
    """A loop with a scheduler and an object of its own that Accelerate saves."""

    def __init__(self, example: bool = False) -> None:
        from protrain.integrations.accelerate import wrap

        forget_precision()
        self.accelerator = accelerate.Accelerator(cpu=True)
        model = network()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        arguments: dict[str, Any] = {"device_memory": "0.3MiB", "progress": False}
        if example:
            arguments["example_batch"] = next(iter(loader()))[0]
        model, optimizer = wrap(self.accelerator, model, optimizer, **arguments)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
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
            loss = F.mse_loss(self.model(rows), target)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
            self.number += 1
            if self.number == until:
                return

    def weights(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


@contextmanager
def no_gathering() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        refuse_gathering(monkeypatch)
        yield


def whole_and_resumed_on_rank(rank: int, folder: Path, example: bool) -> tuple[Any, Any]:
    whole = Loop(example)
    whole.train(HALF)
    with no_gathering():
        assert whole.accelerator.save_state(str(folder)) == folder
    assert whole.optimizer.state_dict()["state"]  # of which direct use is as it was
    whole.train(BATCHES)
    resumed = Loop(example)
    with no_gathering():
        resumed.accelerator.load_state(str(folder))
    assert resumed.number == HALF
    resumed.train(BATCHES)
    assert resumed.optimizer.step_was_skipped is False
    return (whole.losses, whole.weights()), (resumed.losses, resumed.weights())


def assert_goes_on(whole: Any, resumed: Any) -> None:
    assert resumed[0] == whole[0][HALF:]
    for name, value in whole[1].items():
        assert torch.equal(resumed[1][name], value), name


@pytest.mark.parametrize("example", [False, True])
def test_a_resumed_loop_has_the_bits_of_a_whole_one(tmp_path: Path, example: bool) -> None:
    assert_goes_on(*whole_and_resumed_on_rank(0, tmp_path, example))
    assert not list(tmp_path.glob("*.safetensors"))
    assert not (tmp_path / "optimizer.bin").exists()


def test_a_resumed_loop_of_two_processes_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    for whole, resumed in on_ranks(2, whole_and_resumed_on_rank, tmp_path, False):
        assert_goes_on(whole, resumed)
    [save] = (tmp_path / "protrain").glob("*-step-3")
    assert len(list(save.glob("state-*"))) == 2  # each rank has written its own


def test_a_state_is_replaced_in_its_folder(tmp_path: Path) -> None:
    loop = Loop()
    for until in (1, 2):
        loop.train(until)
        loop.accelerator.save_state(str(tmp_path))
    assert [each.name for each in (tmp_path / "protrain").glob("*-step-*")] == ["00002-step-2"]
    loop.train(BATCHES)
    loop.accelerator.load_state(str(tmp_path))
    assert loop.number == 2


def test_two_models_of_one_accelerator_have_folders_of_their_own(tmp_path: Path) -> None:
    from protrain.integrations.accelerate import wrap

    loop = Loop(example=True)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1))
    batch = next(iter(loader()))[0]
    second, optimizer = wrap(loop.accelerator, plain, torch.optim.AdamW(plain.parameters()), example_batch=batch)
    second, optimizer = loop.accelerator.prepare(second, optimizer)
    want = {name: value.clone() for name, value in second.state_dict().items()}
    loop.accelerator.save_state(str(tmp_path))
    loop.accelerator.backward(second(batch).sum())
    optimizer.step()
    loop.accelerator.load_state(str(tmp_path))
    for name, value in want.items():
        assert torch.equal(second.state_dict()[name], value), name


def test_a_torn_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from protrain import CheckpointError
    from protrain.integrations import accelerate as client

    def tear(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    loop = Loop()
    loop.train(1)
    with monkeypatch.context() as torn:
        torn.setattr(client, "save_checkpoint", tear)
        with pytest.raises(KeyboardInterrupt):
            loop.accelerator.save_state(str(tmp_path / "new"))
    with pytest.raises(CheckpointError, match="does not exist"):
        loop.accelerator.load_state(str(tmp_path / "new"))
    loop.accelerator.save_state(str(tmp_path / "old"))
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    loop.train(2)
    with monkeypatch.context() as torn:
        torn.setattr(client, "save_checkpoint", tear)
        with pytest.raises(KeyboardInterrupt):
            loop.accelerator.save_state(str(tmp_path / "old"))
    with pytest.raises(CheckpointError, match=r"files that do not belong to .*interrupted"):
        loop.accelerator.load_state(str(tmp_path / "old"))
    loop.accelerator.load_state(str(tmp_path / "copy"))
    os.unlink(next((tmp_path / "copy" / "protrain").glob("*/state-*")))
    with pytest.raises(CheckpointError, match="is missing"):
        loop.accelerator.load_state(str(tmp_path / "copy"))
    assert len(loop.accelerator._models) == len(loop.accelerator._optimizers) == 1
