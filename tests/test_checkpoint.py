"""Saves are atomic, and loads exact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain.checkpoint import saving, tensor_files
from protrain.checkpoint.loading import load_checkpoint
from protrain.checkpoint.saving import save_checkpoint
from protrain.checkpoint.tensor_files import complete_folder
from tests.checkpoints import make_expanded, make_model, make_run, wrapped


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    save_checkpoint(tmp_path, model, optimizer, extra={"rate": torch.tensor(1e-3), "step": torch.tensor(7)})
    extra = load_checkpoint(tmp_path, model, optimizer)
    assert (extra["rate"].dtype, extra["step"].dtype) == (torch.float32, torch.int64)
    assert torch.equal(extra["rate"], torch.tensor(1e-3))
    assert extra["step"].item() == 7


def test_a_save_that_was_moved_away_and_linked_counts_as_one(tmp_path: Path) -> None:
    """When its turn to be deleted comes, the link is, and not what it names."""
    model, optimizer, _ = make_run(0)
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    save_checkpoint(runs, model, optimizer, extra=1).rename(elsewhere)
    (runs / "00001-step-0").symlink_to(elsewhere)
    assert load_checkpoint(runs, model, optimizer) == 1
    for extra in (2, 3):
        save_checkpoint(runs, model, optimizer, extra=extra)
    assert sorted(path.name for path in runs.iterdir()) == ["00002-step-0", "00003-step-0"]
    assert load_checkpoint(elsewhere, model, optimizer) == 1


def test_another_process_that_saves_there_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = make_run(0)
    write = saving.write_parameters
    said = f"another process writes to {re.escape(str(tmp_path))} at this moment: give each run a folder of its own"

    def write_beside_another(*args: Any) -> Any:
        with pytest.raises(OSError, match=said):
            save_checkpoint(tmp_path, model, optimizer, extra="of the other")
        return write(*args)

    monkeypatch.setattr(saving, "write_parameters", write_beside_another)
    save_checkpoint(tmp_path, model, optimizer, extra="of the first")
    monkeypatch.undo()
    assert load_checkpoint(tmp_path, model, optimizer) == "of the first"
    save_checkpoint(tmp_path, model, optimizer, extra="of the other")
    assert load_checkpoint(tmp_path, model, optimizer) == "of the other"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00001-step-0", "00002-step-0"]


@pytest.mark.parametrize("what", ["a file", "a link to itself"])
def test_what_is_no_folder_is_named(tmp_path: Path, what: str) -> None:
    model, optimizer, _ = make_run(0)
    target = tmp_path / "target"
    target.write_text("notes") if what == "a file" else target.symlink_to(target)
    with pytest.raises(FileExistsError, match=re.escape(str(target))):
        save_checkpoint(target, model, optimizer)
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_of_others_is_deleted(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    for name in (".notes.tmp", ".save.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".file.tmp").touch()
    save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.tmp", ".notes.tmp", "00001-step-0"]
    for keep in (0, 1.5, None):
        with pytest.raises(ValueError, match=f"keep must be at least 1, and a whole number, not {keep}"):
            save_checkpoint(tmp_path, model, optimizer, keep=keep)  # type: ignore[arg-type]  # that is the fault


@pytest.mark.parametrize("failing", ["write_tensors", "write_manifest", "sync"])
@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: type[BaseException]
) -> None:
    model, optimizer, _ = make_run(0)
    earlier = save_checkpoint(tmp_path, model, optimizer)

    def fail(*_: Any) -> None:
        raise error("failed")

    monkeypatch.setattr(tensor_files if failing == "sync" else saving, failing, fail)
    with pytest.raises(error, match="failed"):
        save_checkpoint(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == [earlier]


def test_a_folder_that_another_rank_does_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = make_run(0)
    elsewhere = {"state-00001-00001.safetensors": {"bytes": 1, "crc32": 0, "parameters": {}}}
    monkeypatch.setattr(saving, "write_parameters", lambda *_: (elsewhere, 0))
    with pytest.raises(OSError, match=r"state-00001-00001.safetensors in .*: give a folder that all ranks see"):
        save_checkpoint(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def test_model_and_optimizer_belong_together(tmp_path: Path) -> None:
    model, plain = make_model(0), torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    calls: list[Any] = [
        (save_checkpoint, wrapped(make_model(1))[1]),
        (save_checkpoint, plain),
        (load_checkpoint, plain),
    ]
    for use, optimizer in calls:
        with pytest.raises(ValueError, match=r"the two that protrain\.wrap returned"):
            use(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def test_expanded_buffers_are_restored_and_stay_views(tmp_path: Path) -> None:
    model, optimizer = make_expanded([1.0, float("nan"), -0.0])
    save_checkpoint(tmp_path, model, optimizer)
    other, other_optimizer = make_expanded([0.0, 0.0, 0.0])
    load_checkpoint(tmp_path, other, other_optimizer)
    for name in ("row", "mask", "last"):
        assert str(other.get_buffer(name)) == str(model.get_buffer(name))
    other.get_buffer("row").fill_(5.0)
    assert (other.get_buffer("mask") == 5.0).all()


def test_types_that_no_file_holds_are_named(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    model.register_buffer("waves", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"waves is torch\.complex128, which safetensors files cannot hold"):
        save_checkpoint(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def test_an_exported_folder_is_of_one_process_and_there_once_it_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError("failed")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_files, "sync", fail)
        with pytest.raises(OSError, match="failed"), complete_folder(tmp_path / "model", "exported model") as scratch:
            (scratch / "file").touch()
    assert not list(tmp_path.iterdir())
    with complete_folder(tmp_path / "model", "exported model") as scratch:
        (scratch / "file").touch()
        other = complete_folder(tmp_path / "model", "exported model")
        with pytest.raises(OSError, match=r"another process writes to .*: give another folder for the exp"), other:
            pass
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["file"]


def test_a_disk_itself_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with (
        pytest.raises(ValueError, match=r"is where a disk is mounted: give a folder in it for the exported model"),
        complete_folder(tmp_path, "exported model"),
    ):
        pass
    assert not list(tmp_path.iterdir())
