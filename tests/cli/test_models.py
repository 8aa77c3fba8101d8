"""Models of the command line: what their names mean, how many tokens they can be trained on, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.cli.commands import build_parser
from protrain.cli.main import main
from protrain.cli.models import check_positions, read_architecture
from protrain.cli.shapes import SHAPES, named
from tests.tiny_models import tiny_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def test_positions_that_are_weights_stay_as_many_as_they_are() -> None:
    loaded = read_architecture("gpt2", layers=1)
    check_positions(loaded, 1024)
    with pytest.raises(ValueError, match="--sequence 1025 is longer than the 1024 positions"):
        check_positions(loaded, 1025)


_FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {},
    "mpt": {"max_seq_len": 64},
    "mamba": {},
    "gemma3": {},
    "gemma4": {"text_config": {"global_head_dim": 16}},  # whose layers have heads of two sizes
}


@pytest.mark.parametrize("name", _FAMILIES)
def test_a_model_trains_on_as_many_tokens_as_it_has_positions(name: str, tmp_path: Path) -> None:
    tiny_config(name, _FAMILIES[name]).save_pretrained(tmp_path)
    loaded = read_architecture(str(tmp_path))
    assert loaded.sequence == (1024 if name in ("bloom", "mamba") else 64)
    check_positions(loaded, loaded.sequence)
    with pytest.raises(ValueError, match="longer than the 64 positions") if name == "mpt" else nullcontext():
        check_positions(loaded, 1025)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(loaded.model.config).eval()
    places = torch.arange(loaded.sequence)[None]
    text = {"input_ids": places % 90 + 3, "labels": places % 90 + 3}
    loss = model(**loaded.arguments(text)).loss
    assert torch.equal(model(**loaded.arguments({**text, "position_ids": places})).loss, loss)  # a sequence of one row


@pytest.fixture
def folder(llama_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A saved model that a test may change."""
    return shutil.copytree(llama_folder(), tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "x"}, "StrictDataclassFieldValidationError: .*hidden_size"),
        ({"hidden_size": 17, "num_attention_heads": 2}, "The hidden size .17. is not a multiple"),
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"pad_token_id": 9999}, "AssertionError: Padding_idx must be within num_embeddings"),
        ({"hidden_act": "zoo"}, "KeyError: 'zoo'$"),
        ({"model_type": "zoo"}, "that transformers can load: ValueError: The checkpoint you are trying to load"),
    ],
    ids=str,
)
def test_a_bad_value_of_a_config_names_the_folder(change: dict[str, Any], words: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=rf"(?s)^{folder}.*{words}"):
        read_architecture(str(folder))


def test_a_model_of_another_kind_is_named_and_no_other_class(tmp_path: Path) -> None:
    transformers.T5Config(num_layers=1).save_pretrained(tmp_path)
    words = "is no causal language model that transformers can load: ValueError: .*T5Config.* AutoModelForCausalLM"
    with pytest.raises(ValueError, match=rf"^{tmp_path} {words}.$"):
        read_architecture(str(tmp_path))


@pytest.mark.parametrize("told", [{"AutoConfig": "mine.C"}, {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}])
def test_code_of_a_folder_is_never_run_nor_asked_about(
    told: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: object) -> str:
        raise AssertionError("nobody may be there to answer")

    monkeypatch.setattr("builtins.input", asked)
    config = json.loads((folder / "config.json").read_text())
    (folder / "mine.py").write_text("raise SystemExit('it ran')")
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": told, "model_type": "mine"}))
    with pytest.raises(ValueError, match="custom code which must be executed"):
        read_architecture(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": told}))
    read_architecture(str(folder))  # transformers has a class for it


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "roformer"])
def test_a_model_that_sees_the_tokens_that_it_is_to_predict_is_refused(kind: str, tmp_path: Path) -> None:
    config = tiny_config(kind, {})
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'a token sees those that follow it.* put "is_decoder": true into its config'):
        read_architecture(str(tmp_path))
    config.is_decoder = True
    config.save_pretrained(tmp_path)
    read_architecture(str(tmp_path))


def test_a_quantized_model_is_refused_by_its_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    read_architecture(str(folder))
    quantized = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    assert main(["plan", str(folder), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{folder}: its config.json has a quantization_config" in said
    assert "take quantization_config out of config.json" in said


def test_a_config_that_is_no_object_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text("5")
    assert main(["plan", str(folder), "--device", "cpu"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("protrain: profiling")]
    assert len(lines) == 1
    assert f"{folder} is no causal language model that transformers can load: TypeError: " in lines[0]


def test_a_plan_needs_the_config_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hardware", "rtx3090", "--no-compile", "--batch", "2", "--sequence", "16", "--json"]

    def planned() -> Any:
        capsys.readouterr()
        assert main(["plan", str(folder), *options]) == 0
        return json.loads(capsys.readouterr().out)["plan"]

    whole = planned()
    (folder / "tokenizer.json").write_text("{}")  # it cannot be read
    assert planned() == whole
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert planned() == whole


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_folder_with_a_model_goes_before_a_shape_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named("tiny") == "tiny"
    (tmp_path / "tiny").mkdir()
    assert named("tiny") == "tiny"
    (tmp_path / "tiny" / "config.json").touch()
    assert [named(name) for name in ("tiny", "gpt2", "org/model")] == ["./tiny", "gpt2", "org/model"]
    for words in (["plan"], ["export", "run", "exported", "--model"]):
        assert build_parser(words[0]).parse_args([*words, "tiny"]).model == "./tiny"


# -- the Hugging Face Hub ----------------------------------------------------------------------------------------------


constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub, which cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_plan_needs_no_weights(
    hub: Path, llama_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, revision = hub / "models--some-org--Some-Model", "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    shutil.copytree(llama_folder(), model / "snapshots" / revision, ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(["plan", "some-org/Some-Model", "--hardware", "h100", "--batch", "2", "--sequence", "32"]) == 0
    assert "fits on NVIDIA H100" in capsys.readouterr().out


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("command", [["train", "--data", "rows.jsonl", "--model"], ["plan", "--device", "cpu"]])
def test_a_model_that_the_hub_does_not_give_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "no-org/no-model"]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert "the Hugging Face Hub does not give a model 'no-org/no-model': " in said
    assert not list(tmp_path.glob("runs/*"))


# -- named shapes ------------------------------------------------------------------------------------------------------


# These are published parameter counts. The large GPT-2 shapes are named after theirs.
BILLIONS = {
    "tiny": 0.00182,
    "gpt2": 0.12444,
    "gpt2-10b": 9.876,
    "gpt2-15b": 14.918,
    "gpt2-20b": 19.75,
    "gpt2-30b": 30.22,
    "gpt2-40b": 40.69,
    "opt-13b": 12.853,
    "opt-30b": 29.975,
    "llama-1b": 1.3454,
    "llama-7b": 7.2417,
    "llama2-13b": 13.016,
    "llama2-34b": 33.744,
    "llama3-8b": 8.0303,
    "llama3-70b": 70.554,
    "llama3.2-1b": 1.2358,
    "mistral-7b": 7.2417,
    "qwen2.5-7b": 7.6156,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_its_size_and_no_special_tokens(name: str) -> None:
    config = transformers.AutoConfig.for_model(**SHAPES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=1e-3)
    assert model.generation_config.eos_token_id is None
