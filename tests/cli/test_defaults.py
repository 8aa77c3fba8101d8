"""What no option says: which of two models a name means, which text is read, and how often a run is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from protrain.checkpoint.manifest import list_saves
from protrain.cli.commands import build_parser
from protrain.cli.job import start
from protrain.cli.main import main
from protrain.cli.shapes import SHAPES, named

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

SMALL = ["--device", "cpu", "--batch", "1", "--sequence", "16", "--sample-tokens", "0", "--no-model", "--json"]


@pytest.fixture
def tiny_beside(tmp_path: Path, llama_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the folder `tiny` of the working directory."""
    (tmp_path / "tiny").symlink_to(llama_folder())
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny"


def test_a_folder_without_a_model_takes_no_name_of_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("tiny") == "tiny"
    (tmp_path / "tiny").mkdir()
    assert named("tiny") == "tiny"
    (tmp_path / "tiny" / "config.json").touch()
    assert [named(name) for name in ("tiny", "gpt2", "org/model")] == ["./tiny", "gpt2", "org/model"]


@pytest.mark.parametrize("words", [["train", "--model"], ["plan"], ["export", "run", "exported", "--model"]])
def test_a_folder_goes_before_a_shape_of_its_name(words: list[str], tiny_beside: Path) -> None:
    assert build_parser(words[0]).parse_args([*words, "tiny"]).model == "./tiny"


def test_a_plan_and_a_run_name_the_folder_that_goes_before(
    tiny_beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--hardware", "rtx3090", "--no-compile", "--batch", "2", "--sequence", "16"]
    assert main(["plan", "tiny", *options]) == 0
    assert "\nLlamaForCausalLM of ./tiny, " in capsys.readouterr().out
    assert main(["train", "--model", "tiny", "--data", "text.txt", "--steps", "1", "--folder", "run", *SMALL]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"] == str(tiny_beside)
    assert f"protrain: training {tiny_beside} on {tiny_beside.parent}/text.txt" in printed.err
    assert main(["train", "--resume", "--folder", "run", "--model", "tiny"]) == 0


def test_a_folder_has_no_text_of_its_own_and_a_shape_by_its_name_has_one(tiny_beside: Path, tmp_path: Path) -> None:
    for model in ("./tiny", str(tiny_beside)):
        with pytest.raises(ValueError, match=r"^--data is missing: give the text or the rows that --model .*tiny is"):
            start(tmp_path / "run", {"model": model, "from_scratch": True})
    for model in SHAPES:
        assert start(tmp_path / "run", {"model": model}).data is None


def test_a_model_of_the_hub_is_not_downloaded_in_vain(
    tiny_beside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def on_disk(name: str, *, weights: bool) -> str:
        asked.append(weights)
        return str(tiny_beside)

    monkeypatch.setattr("protrain.cli.train_run.on_disk", on_disk)
    assert main(["train", "--model", "org/model", "--device", "cpu"]) == 2
    assert (asked, "--data is missing" in capsys.readouterr().err) == ([False], True)


def test_the_text_that_is_read_by_default_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.py").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert main(["train", "--model", "tiny", "--steps", "1", "--folder", str(tmp_path / "run"), *SMALL]) == 0
    assert "protrain: training tiny on the sources of the library of Python, by default" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "saved"), [([], range(2, 21, 2)), (["--checkpoint-every", "15"], (15, 20))])
def test_a_run_is_saved_ten_times_unless_it_is_told_otherwise(
    options: list[str], saved: list[int], tiny_beside: Path
) -> None:
    command = ["train", "--model", "tiny", "--data", "text.txt", "--steps", "20", "--keep", "30", "--folder", "run"]
    assert main([*command, *SMALL, *options]) == 0
    steps = [int(save.name.rpartition("-")[2]) for save in list_saves(Path("run") / "checkpoints")]
    assert steps == list(saved)


def test_a_run_computes_its_loss_in_pieces_where_that_is_the_same(
    tiny_beside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.CohereConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.CohereForCausalLM(config).save_pretrained(tmp_path / "cohere")  # which scales its logits
    for model, chunked in (("tiny", True), ("cohere", False)):
        again = ["train", "--model", model, "--data", "text.txt", "--steps", "1", *SMALL, "--folder", f"run-{model}"]
        assert main(again) == 0
        job, plan = (json.loads(Path(f"run-{model}/{name}.json").read_text()) for name in ("job", "plan"))
        assert (job["chunked_loss"], plan["chunked_loss"]) == (chunked, chunked)
    capsys.readouterr()
    assert main([*again[:-1], "run", "--chunked-loss"]) == 2
    said = "--chunked-loss does not work with CohereForCausalLM, which changes its logits before the loss: leave it out"
    assert capsys.readouterr().err.splitlines()[-1] == f"protrain train: {said}"
    assert not Path("run").exists()
    Path("run-cohere/summary.json").unlink()
    Path("run-cohere/job.json").write_text(json.dumps({**job, "chunked_loss": True}))  # as of a run of long ago
    assert main(["train", "--resume", "--folder", "run-cohere"]) == 2
    assert said in capsys.readouterr().err
