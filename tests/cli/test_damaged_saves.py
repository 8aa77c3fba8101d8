"""A run whose newest save is damaged is refused before it is profiled, planned or placed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import protrain
import protrain.cli.prepare
from protrain.checkpoint.manifest import MANIFEST, list_saves, read_manifest
from protrain.cli.main import main
from tests.checkpoints import rewrite

pytest.importorskip("transformers")

STATE = "state-00001.safetensors"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two saves that was stopped before its end."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "text.txt").write_text("some text " * 100)
    options = [
        f"--model=tiny --device=cpu --batch=1 --sequence=16 --steps=2 --warmup=0 --folder={folder}/run",
        f"--data={folder}/text.txt --no-model --sample-tokens=0 --checkpoint-every=1 --evaluate-every=0",
    ]
    assert main(["train", *" ".join(options).split()]) == 0
    (folder / "run" / "summary.json").unlink()
    return folder / "run"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _spoil_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def _forget_parameter(save: Path) -> None:
    """Change the manifest as if it were that of another save."""
    files = read_manifest(save)["files"]
    files[STATE]["parameters"][0] = "other.weight"
    rewrite(save, files=files)


@pytest.mark.parametrize(
    ("damage", "said", "older"),
    [
        (lambda save: (save / STATE).unlink(), f"{STATE} is missing", True),
        (lambda save: _cut(save / STATE), f"{STATE} has ", False),
        (lambda save: _spoil_header(save / STATE), f"{STATE} is damaged: ", True),
        (lambda save: _cut(save / MANIFEST), f"{MANIFEST} is damaged", False),
        (_forget_parameter, f"{STATE} is damaged: it lacks the parameter 'other.weight' that {MANIFEST} names", True),
    ],
    ids=["missing", "truncated, no older save", "header", "manifest, no older save", "other manifest"],
)
def test_a_damaged_save_is_named_before_any_work(
    damage: Callable[[Path], None],
    said: str,
    older: bool,
    stopped: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("the text is read, or the model profiled")

    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    first, newest = list_saves(folder / "checkpoints")
    if not older:
        shutil.rmtree(first)
    damage(newest)
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(protrain, "wrap", refuse)
    monkeypatch.setattr(protrain.cli.prepare, "read_corpus", refuse)
    capsys.readouterr()
    assert main(["train", "--resume", "--folder", str(folder)]) == 2
    error = capsys.readouterr().err
    remedy = f"delete {newest} to go on from {first.name}" if older else "there is no older save beside it: put a whole"
    assert error.startswith(f"protrain train: {newest}/{said}")
    assert remedy in error
    assert len(error.splitlines()) == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_a_run_goes_on_from_the_older_save_as_it_was_told(stopped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    newest = list_saves(folder / "checkpoints")[-1]
    _cut(newest / STATE)
    assert main(["train", "--resume", "--folder", str(folder)]) == 2
    shutil.rmtree(newest)
    assert main(["train", "--resume", "--folder", str(folder)]) == 0
    assert (folder / "summary.json").exists()


def test_changed_text_is_named_before_any_profile(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text = tmp_path / "run", stopped.parent / "text.txt"
    shutil.copytree(stopped, folder)
    monkeypatch.setattr(protrain, "wrap", lambda *_, **__: pytest.fail("the model is profiled"))
    whole = text.read_text()
    text.write_text(whole.replace("some", "none"))
    try:
        assert main(["train", "--resume", "--folder", str(folder)]) == 2
    finally:
        text.write_text(whole)
    assert f"the data changed since {folder} was saved; restore it" in capsys.readouterr().err.splitlines()[-1]
