"""Checkpoints of the Trainers on ProTrain: what is in them, and which of them are resumed."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from protrain.checkpoint.tensor_files import FILE_BYTES
from protrain.common.errors import CheckpointError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.pool import errors_on, on_ranks
from tests.engine.harness import assert_same
from tests.integrations.clients import Run, make, train, train_on_rank

HALF, LAST = "checkpoint-2", "checkpoint-4"
pytestmark = pytest.mark.filterwarnings("ignore:gradient checkpointing of:UserWarning", "ignore::FutureWarning")


def assert_same_runs(one: Run, other: Run) -> None:
    assert one.log == other.log
    assert torch.equal(one.random, other.random)
    assert_same(one.weights, other.weights)


@pytest.mark.parametrize(
    "client",
    ["Trainer", "SFT with LoRA", *(pytest.param(each, marks=pytest.mark.slow) for each in ("GRPO", "Contrast"))],
)
def test_a_resumed_run_has_the_bits_of_one_without_a_break(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither holds the whole state of the optimizer."""
    for gathering in ("full_state_dict", "state_dict", "load_state_dict"):
        monkeypatch.setattr(ProTrainOptimizer, gathering, None)
    checkpoint = tmp_path / "through" / HALF
    through = train(client, tmp_path / "through", on_protrain=True)
    assert_same_runs(train(client, tmp_path / "resumed", on_protrain=True, resume=checkpoint), through)
    assert not (checkpoint / "optimizer.pt").exists()
    (save,) = (checkpoint / "protrain").iterdir()
    assert (json.loads((save / "checkpoint.json").read_text())["base"] is not None) == ("LoRA" in client)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def delete(folder: Path) -> None:
    shutil.rmtree(folder / "protrain")
    (folder / "trainer_state.json").unlink()


# What may be left of a process that was killed while it saved.
TORN: dict[str, Callable[[Path], None]] = {
    "only the model": delete,
    "no state of the Trainer": lambda folder: (folder / "trainer_state.json").unlink(),
    "half of the state of the Trainer": lambda folder: cut(folder / "trainer_state.json"),
    "half of the state of the optimizer": lambda folder: cut(next(folder.glob("protrain/*/state-00001.safetensors"))),
    "no state of the optimizer": lambda folder: shutil.rmtree(next(folder.glob("protrain/*"))),
}


@pytest.mark.parametrize("left", TORN)
def test_the_newest_whole_checkpoint_is_resumed_and_a_torn_one_is_refused(
    left: str, saved: tuple[Path, Run], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    TORN[left](folder / LAST)
    with pytest.raises(CheckpointError, match=rf"{folder / LAST} was not saved to its end"):
        train("Trainer", folder, on_protrain=True, resume=folder / LAST)
    with pytest.warns(UserWarning, match=rf"goes back to an older checkpoint: {folder / LAST} was not saved"):
        assert_same_runs(train("Trainer", folder, on_protrain=True, resume=True), saved[1])
    with warnings.catch_warnings(action="error", category=UserWarning):  # the last one is whole again
        train("Trainer", folder, on_protrain=True, resume=True, max_steps=5)


def test_the_save_of_a_plain_trainer_is_refused(tmp_path: Path) -> None:
    train("Trainer", tmp_path, on_protrain=False)
    with pytest.raises(CheckpointError, match=rf"{LAST} has no protrain/ with the optimizer's state"):
        train("Trainer", tmp_path, on_protrain=True, resume=tmp_path / LAST)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A training with its checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, train("Trainer", folder, on_protrain=True)


def test_two_processes_agree_on_the_checkpoint(saved: tuple[Path, Run], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    (folder / LAST / "trainer_state.json").unlink()
    for error in errors_on(2, train_on_rank, "Trainer", folder, True, {"resume": folder / LAST}):
        assert error.startswith(f"CheckpointError: {folder / LAST} was not saved to its end")
    for resumed in on_ranks(2, train_on_rank, "Trainer", folder, True, {"resume": True}):
        assert len(resumed.losses) == len(saved[1].losses)  # its log has the steps before


# The evaluation's loss grows after the first checkpoint of the Trainer and falls with adapters.
BEST: dict[str, dict[str, Any]] = {
    "Trainer": {"save_total_limit": 1},
    "SFT with LoRA": {"save_total_limit": 1, "greater_is_better": True},
}


class AtSaves(TrainerCallback):
    """Keeps the weights at each save."""

    def __init__(self) -> None:
        self.weights: dict[str, dict[str, torch.Tensor]] = {}

    def on_save(self, _: Any, state: Any, __: Any, *, model: Any, **___: Any) -> None:
        taken = {name: value.clone() for name, value in model.state_dict().items()}
        self.weights[f"checkpoint-{state.global_step}"] = taken


@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("client", BEST)
def test_the_best_model_is_loaded_and_other_checkpoints_are_deleted(
    client: str, only_model: bool, tmp_path: Path
) -> None:
    best = {"load_best_model_at_end": True, "save_only_model": only_model, **BEST[client]}
    trainer, at_saves = make(client, tmp_path / "run", on_protrain=True, **best), AtSaves()
    trainer.add_callback(at_saves)
    trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [HALF]
    assert_same(dict(trainer.model.state_dict()), at_saves.weights[HALF])


@pytest.mark.parametrize("client", ["Trainer", "SFT", "SFT with LoRA"])
def test_a_saved_model_has_the_files_of_a_plain_save_without_a_copy_of_the_model(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in one file, after several of an earlier save. Adapters are in one."""
    trainer = make(client, tmp_path / "run", on_protrain=True, save_strategy="no", max_steps=2)
    trainer.train()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.save_pretrained(tmp_path / "plain", state_dict=dict(weights))
    saved, small = tmp_path / "ours", 1 << 12
    for file_bytes in (small, FILE_BYTES):
        with monkeypatch.context() as patched:
            patched.setattr(type(trainer.model), "state_dict", None)
            patched.setattr("protrain.checkpoint.export.FILE_BYTES", file_bytes)
            trainer.save_model(str(saved))
        several = [*saved.glob("model-*.safetensors")]
        assert (len(several) > 2) == (file_bytes == small and "LoRA" not in client)
        if several:
            again = type(trainer.model).from_pretrained(saved).state_dict()
            assert_same({name: value.to(weights[name].dtype) for name, value in again.items()}, weights)
    plain, ours = ({path.name: path for path in (tmp_path / name).iterdir()} for name in ("plain", "ours"))
    assert plain.keys() <= ours.keys()
    assert not [name for name in ours if "model" in name and name not in plain]
    for name in plain:
        if name.endswith(".safetensors"):
            assert_same(load_file(ours[name]), load_file(plain[name]))
        if name.endswith(".json"):
            assert json.loads(ours[name].read_text()) == json.loads(plain[name].read_text()), name
