"""Models of the Hugging Face Hub by their names. The cache of the tests has one, and nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protrain.cli.main import main
from tests.cli.test_lora import arguments

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("transformers")
pytest.importorskip("peft")

NAME, REVISIONS = "some-org/Some-Model", ("0" * 40, "1" * 40)


def publish(hub: Path, source: Path, revision: str) -> Path:
    """Have the cache ``hub`` hold ``source`` as the newest ``revision`` of the model."""
    model = hub / f"models--{NAME.replace('/', '--')}"
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(revision)
    return shutil.copytree(source, model / "snapshots" / revision)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.slow
def test_a_run_keeps_the_revision_that_it_began_with(
    hub: Path, tmp_path: Path, llama_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    download, looked_up = huggingface_hub.snapshot_download, []

    def watched(name: str, **how: Any) -> Any:
        looked_up.append(name)
        return download(name, **how)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", watched)
    place = tmp_path / "place"
    shutil.copytree(llama_folder(), place / "source")
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    lora = ("--lora", "r=4", "--merge")
    assert main(arguments(place, tmp_path / "local", *lora)) == 0

    first = publish(hub, place / "source", REVISIONS[0])
    named = [word if word != str(place / "source") else NAME for word in arguments(place, tmp_path / "run", *lora)]
    assert main([*named, "--steps", "3"]) == 0
    assert json.loads((tmp_path / "run" / "job.json").read_text())["model"] == str(first)
    assert looked_up == [NAME]
    other = publish(hub, place / "source", REVISIONS[1])  # whose weights are not there, so a use of it would fail
    next(other.glob("*.safetensors")).unlink()
    assert main(["train", "--resume", "--folder", str(tmp_path / "run"), "--model", NAME, "--steps", "6"]) == 0

    assert main([*named[: named.index("--folder")], "--folder", str(tmp_path / "whole"), *lora]) == 2
    shutil.copy(first / "model.safetensors", other)
    assert main([*named, "--folder", str(tmp_path / "whole")]) == 0
    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("local", "whole")]
    assert weights[0] == weights[1]


def test_a_plan_needs_no_weights(
    hub: Path, llama_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    next(publish(hub, llama_folder(), REVISIONS[0]).glob("*.safetensors")).unlink()
    assert main(["plan", NAME, "--hardware", "h100", "--batch", "2", "--sequence", "32"]) == 0
    assert "fits on NVIDIA H100" in capsys.readouterr().out


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("command", [["train", "--device", "cpu", "--model"], ["plan", "--device", "cpu"]])
def test_a_model_that_the_hub_does_not_give_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "no-org/no-model"]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert (
        "there is no folder no-org/no-model, and the Hugging Face Hub does not give a model 'no-org/no-model': " in said
    )
    assert not list(tmp_path.glob("runs/*"))
