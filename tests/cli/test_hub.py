"""Models of the Hugging Face Hub by their names. The cache of the tests has one, and nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from protrain.cli.main import main

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("transformers")
pytest.importorskip("peft")

NAME, REVISION = "some-org/Some-Model", "0" * 40


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


def test_a_plan_needs_no_weights(
    hub: Path, llama_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    next(publish(hub, llama_folder(), REVISION).glob("*.safetensors")).unlink()
    assert main(["plan", NAME, "--hardware", "h100", "--batch", "2", "--sequence", "32"]) == 0
    assert "fits on NVIDIA H100" in capsys.readouterr().out


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("command", [["train", "--data", "rows.jsonl", "--model"], ["plan", "--device", "cpu"]])
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
