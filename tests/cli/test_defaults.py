"""Which of two models a name means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protrain.cli.commands import build_parser
from protrain.cli.main import main
from protrain.cli.shapes import named

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


@pytest.fixture
def tiny_beside(tmp_path: Path, llama_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the folder `tiny` of the working directory."""
    (tmp_path / "tiny").symlink_to(llama_folder())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny"


def test_a_folder_without_a_model_takes_no_name_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("tiny") == "tiny"
    (tmp_path / "tiny").mkdir()
    assert named("tiny") == "tiny"
    (tmp_path / "tiny" / "config.json").touch()
    assert [named(name) for name in ("tiny", "gpt2", "org/model")] == ["./tiny", "gpt2", "org/model"]


@pytest.mark.parametrize("words", [["plan"], ["export", "run", "exported", "--model"]])
def test_a_folder_goes_before_a_shape_of_its_name(words: list[str], tiny_beside: Path) -> None:
    assert build_parser(words[0]).parse_args([*words, "tiny"]).model == "./tiny"


def test_a_plan_names_the_folder_that_goes_before(tiny_beside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hardware", "rtx3090", "--no-compile", "--batch", "2", "--sequence", "16"]
    assert main(["plan", "tiny", *options]) == 0
    assert "\nLlamaForCausalLM of ./tiny, " in capsys.readouterr().out
