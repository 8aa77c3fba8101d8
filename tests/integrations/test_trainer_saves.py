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

from protrain.checkpoint.tensor_files import FILE_BYTES
from protrain.common.errors import CheckpointError
from tests.distributed.pool import on_ranks
from tests.integrations.clients import Run, error_on_rank, make, prepare, train, train_on_rank
from tests.integrations.save_runs import (
    best,
    best_on_rank,
    through_and_resumed,
    through_and_resumed_on_rank,
)

HALF, LAST = "checkpoint-2", "checkpoint-4"
pytestmark = pytest.mark.filterwarnings("ignore:gradient checkpointing of:UserWarning", "ignore::FutureWarning")


def assert_same(one: Run, other: Run) -> None:
    assert one.log == other.log
    assert torch.equal(one.random, other.random)
    assert_same_weights(one.weights, other.weights)


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(other[name], value), name


@pytest.mark.parametrize(
    "client",
    ["Trainer", "SFT with LoRA", *(pytest.param(each, marks=pytest.mark.slow) for each in ("GRPO", "sentences"))],
)
def test_a_resumed_run_has_the_bits_of_one_without_a_break(client: str, tmp_path: Path) -> None:
    prepare(client, tmp_path)
    through, resumed = through_and_resumed(client, tmp_path)
    assert_same(resumed, through)
    checkpoint = tmp_path / "through" / HALF
    assert not (checkpoint / "optimizer.pt").exists()
    (save,) = (checkpoint / "protrain").iterdir()
    assert (json.loads((save / "checkpoint.json").read_text())["base"] is not None) == ("LoRA" in client)


@pytest.mark.parametrize("client", ["Trainer", pytest.param("SFT with LoRA", marks=pytest.mark.slow)])
def test_two_processes_resume_with_the_same_bits(client: str, tmp_path: Path) -> None:
    prepare(client, tmp_path)
    for through, resumed in on_ranks(2, through_and_resumed_on_rank, client, tmp_path):
        assert_same(resumed, through)


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
        assert_same(train("Trainer", folder, on_protrain=True, resume=True), saved[1])
    with warnings.catch_warnings(action="error", category=UserWarning):  # the last one is whole again
        train("Trainer", folder, on_protrain=True, resume=True, max_steps=5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A training with its checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, train("Trainer", folder, on_protrain=True)


def test_two_processes_agree_on_the_checkpoint(saved: tuple[Path, Run], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder)
    (folder / LAST / "trainer_state.json").unlink()
    errors = on_ranks(2, error_on_rank, "Trainer", folder, {"resume": folder / LAST})
    assert all(f"{folder / LAST} was not saved to its end" in error for error in errors)
    for resumed in on_ranks(2, train_on_rank, "Trainer", folder, True, {"resume": True}):
        assert len(resumed.losses) == len(saved[1].losses)  # its log has the steps before


# The evaluation's loss grows after the first checkpoint of the Trainer and falls with adapters.
BEST: dict[str, dict[str, Any]] = {
    "Trainer": {"save_total_limit": 1},
    "SFT with LoRA": {"save_total_limit": 1, "greater_is_better": True},
}


@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("client", BEST)
def test_the_best_model_is_loaded_and_other_checkpoints_are_deleted(
    client: str, only_model: bool, tmp_path: Path
) -> None:
    prepare(client, tmp_path)
    left, at_save, at_end = best(client, tmp_path / "run", BEST[client] | {"save_only_model": only_model})
    assert left == [HALF]
    assert_same_weights(at_end, at_save)


def test_two_processes_load_the_best_model(tmp_path: Path) -> None:
    arguments = {"save_total_limit": 1, "greater_is_better": True}  # with larger batches the loss falls
    for _, at_save, at_end in on_ranks(2, best_on_rank, "Trainer", tmp_path, arguments):
        assert_same_weights(at_end, at_save)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [HALF]


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
            assert_same_weights({name: value.to(weights[name].dtype) for name, value in again.items()}, weights)
    plain, ours = ({path.name: path for path in (tmp_path / name).iterdir()} for name in ("plain", "ours"))
    assert plain.keys() <= ours.keys()
    assert not [name for name in ours if "model" in name and name not in plain]
    for name in plain:
        if name.endswith(".safetensors"):
            assert_same_weights(load_file(ours[name]), load_file(plain[name]))
        if name.endswith(".json"):
            assert json.loads(ours[name].read_text()) == json.loads(plain[name].read_text()), name
