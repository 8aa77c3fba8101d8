"""Models of the command line: folders that are no models, and how many tokens a model can be trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.cli.main import main
from protrain.cli.models import fit_positions, load_model, refuse_unshifted

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def test_positions_that_are_weights_stay_as_many_as_they_are() -> None:
    loaded = load_model("gpt2", layers=1)
    fit_positions(loaded, 1024)
    with pytest.raises(ValueError, match="--sequence 1025 is longer than the 1024 positions"):
        fit_positions(loaded, 1025)


def test_computed_positions_of_random_weights_have_no_end() -> None:
    loaded = load_model("tiny", layers=1)
    positions = loaded.config.max_position_embeddings
    fit_positions(loaded, positions - 1)
    assert loaded.config.max_position_embeddings == positions
    fit_positions(loaded, positions + 7)
    assert loaded.config.max_position_embeddings == positions + 7  # a model that is saved later has these in its config


@pytest.mark.parametrize("scaled", [False, True])
def test_trained_and_scaled_positions_end(scaled: bool, tmp_path: Path) -> None:
    loaded = load_model("tiny", layers=1)
    positions = loaded.config.max_position_embeddings
    if scaled:
        loaded.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    else:
        with torch.random.fork_rng(devices=[]):
            transformers.AutoModelForCausalLM.from_config(loaded.config).save_pretrained(tmp_path)
        loaded = load_model(str(tmp_path))
    with pytest.raises(ValueError, match=f"longer than the {positions} positions"):
        fit_positions(loaded, positions + 1)


_LAYERS = {
    **{"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_SEEN = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 256, "hidden_size": 16, "n_layer": 1, "n_head": 1},
    "mpt": {"vocab_size": 256, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 48},
    "roberta": {**_LAYERS, "max_position_embeddings": 50, "is_decoder": True, "pad_token_id": 1},
    "mamba": {"vocab_size": 256, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},
    "gemma3": {
        "text_config": {**_LAYERS, "head_dim": 8, "max_position_embeddings": 48},
        "vision_config": {**_SEEN, "image_size": 32, "patch_size": 8},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {  # whose layers have heads of two sizes
        "text_config": {
            **{**_LAYERS, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 48, "sliding_window": 8},
            **{"layer_types": ["sliding_attention", "full_attention"]},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256},
        }
    },
}


@pytest.fixture
def of_family(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the folder of a tiny model."""

    def made(name: str) -> Path:
        transformers.AutoConfig.for_model(name, **_FAMILIES[name]).save_pretrained(tmp_path / name)
        return tmp_path / name

    return made


@pytest.mark.parametrize("name", _FAMILIES)
def test_a_model_trains_on_as_many_tokens_as_it_has_positions(name: str, of_family: Callable[[str], Path]) -> None:
    loaded = load_model(str(of_family(name)), from_scratch=True)
    ends = name not in ("bloom", "mamba")
    assert loaded.sequence == (48 if ends else 1024)
    fit_positions(loaded, loaded.sequence)
    with pytest.raises(ValueError, match="--sequence 1025 is longer than the 48 positions") if ends else nullcontext():
        fit_positions(loaded, 1025)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(loaded.model.config).eval()
    places = torch.arange(loaded.sequence)[None]
    text = {"input_ids": places % 200 + 3, "labels": places % 200 + 3}
    loss = model(**loaded.arguments(text)).loss
    assert torch.equal(model(**loaded.arguments({**text, "position_ids": places})).loss, loss)  # a sequence of one row


@pytest.mark.parametrize(
    ("name", "channels"), {"bloom": 16, "mpt": 16, "roberta": 32, "mamba": 0, "gemma3": 32, "gemma4": 16 + 32}.items()
)
def test_the_rate_of_a_run_counts_the_attention_that_its_family_has(
    name: str, channels: int, of_family: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("a line of text, and another one\n" * 300)
    options = ["--from-scratch", "--device", "cpu", "--steps", "3", "--batch", "1", "--sequence", "40", "--no-model"]
    places = ["--data", str(tmp_path / "text.txt"), "--folder", str(tmp_path / "run")]
    assert main(["train", "--model", str(of_family(name)), *options, *places]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    of_parameters, of_attention = 6 * summary["parameters"], 12 * channels * 40 // 2
    assert summary["model_tflops"] / summary["parameter_tflops"] == pytest.approx(1 + of_attention / of_parameters)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model of a few thousand parameters."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.random.fork_rng(devices=[]):
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "x"}, "StrictDataclassFieldValidationError: .*hidden_size.* expected int"),
        ({"hidden_size": -16}, "RuntimeError: .*negative dimension"),
        ({"hidden_size": 0}, r"by its config\.json model\..* has no elements"),
        ({"num_hidden_layers": 0}, r"by its config\.json the model has no layers, as model\.layers is empty"),
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"dtype": "float99"}, "AttributeError: .*float99"),
        ({"num_labels": "x"}, "TypeError: "),
        ({"pad_token_id": 9999}, "AssertionError: Padding_idx must be within num_embeddings"),
        ({"hidden_act": "zoo"}, "KeyError: 'zoo'$"),
        ({"model_type": "zoo"}, "that transformers can load: The checkpoint you are trying to load"),
        ({"max_position_embeddings": -5}, r"by its config\.json the model has -5 positions"),
    ],
    ids=str,
)
def test_a_bad_value_of_a_config_names_the_folder(change: dict[str, Any], words: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=rf"(?s)^{folder}.*{words}"):
        load_model(str(folder))


def test_a_model_of_another_kind_is_named_and_no_other_class(tmp_path: Path) -> None:
    transformers.T5Config(num_layers=1).save_pretrained(tmp_path)
    words = "is no causal language model that transformers can load: there is none of the type 't5'; wrap such a model"
    with pytest.raises(ValueError, match=rf"^{tmp_path} {words} in a loop of your own$"):
        load_model(str(tmp_path))


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
    with pytest.raises(ValueError, match="it needs Python code of its own folder, which this command never runs; wrap"):
        load_model(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": told}))
    load_model(str(folder))  # transformers has a class for it


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra", "RoFormer"])
def test_a_model_that_sees_the_tokens_that_it_is_to_predict_is_refused(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r'a token sees those that follow it.* put "is_decoder": true into its config'):
        load_model(str(tmp_path), from_scratch=True)
    config.is_decoder = True
    config.save_pretrained(tmp_path)
    load_model(str(tmp_path), from_scratch=True)


_SMALL = {"vocab_size": 256, "max_position_embeddings": 32}
_DECODERS: dict[str, dict[str, Any]] = {
    "Bart": {**_SMALL, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 16},
    "MBart": {**_SMALL, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 16},
    "XLM": {**_SMALL, "emb_dim": 16, "n_layers": 1, "n_heads": 1},
    "XLNet": {"vocab_size": 256, "d_model": 16, "d_inner": 16, "n_layer": 1, "n_head": 1},  # it has -1 positions
    "ProphetNet": {
        **{**_SMALL, "hidden_size": 16, "num_decoder_layers": 1, "num_decoder_attention_heads": 1},
        **{"decoder_ffn_dim": 16, "add_cross_attention": False, "is_encoder_decoder": False},
    },
    "GPT2": {"vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 1},
    "XGLM": {**_SMALL, "d_model": 16, "num_layers": 1, "attention_heads": 1, "ffn_dim": 16},
    "Bert": {**_SMALL, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1},
    "Mamba": {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1},
}


@pytest.mark.parametrize("kind", _DECODERS)
def test_a_loss_that_compares_a_token_with_itself_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = getattr(transformers, f"{kind}Config")(**_DECODERS[kind], is_decoder=True)
    config.save_pretrained(tmp_path)
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(4)[None]
    first = torch.where(ids == 0, 7, -100)  # no token comes before the first, so its label is none to be learnt
    unshifted = bool(model(input_ids=ids, labels=first).loss > 0)
    assert unshifted == (kind in ("Bart", "MBart", "XLM", "XLNet", "ProphetNet"))
    loaded = load_model(str(tmp_path), from_scratch=True)
    with pytest.raises(ValueError, match="compares each token with itself") if unshifted else nullcontext():
        refuse_unshifted(loaded)
    if unshifted:
        run = [
            "--from-scratch",
            "--data",
            __file__,
            "--device",
            "cpu",
            "--steps",
            "1",
            "--folder",
            str(tmp_path / "run"),
        ]
        assert main(["train", "--model", str(tmp_path), *run]) == 2
        assert "compares each token with itself" in capsys.readouterr().err


def test_a_quantized_model_is_refused_by_its_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    load_model(str(folder))
    quantized = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    for command in (["plan"], ["train", "--model"]):
        assert main([*command, str(folder), "--data", __file__, "--device", "cpu"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"{folder}: its config.json has a quantization_config" in said
        assert "take quantization_config out of config.json" in said


def test_a_decoder_without_layers_is_found_and_one_without_an_encoder_is_none(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        **{"vocab_size": 256, "d_model": 16, "max_position_embeddings": 32, "encoder_layers": 0, "decoder_layers": 1},
        **{"encoder_attention_heads": 1, "decoder_attention_heads": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
        **{"is_encoder_decoder": False, "is_decoder": True},
    )
    with torch.random.fork_rng(devices=[]):
        transformers.BartForCausalLM(config).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"decoder_layers": 0}))
    with pytest.raises(ValueError, match=r"the model has no layers, as model\.decoder\.layers is empty"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("command", [["plan"], ["train", "--model"]], ids=["plan", "train"])
def test_a_config_that_is_no_object_is_one_line(
    command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text("5")
    assert main([*command, str(folder), "--data", __file__, "--device", "cpu"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("protrain: profiling")]
    assert len(lines) == 1
    assert f"{folder} is no causal language model that transformers can load: TypeError: " in lines[0]


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_not_taken_for_a_broken_model(text: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=rf"^the tokenizer of {folder} cannot be read: \w"):
        load_model(str(folder))


def test_a_plan_needs_the_config_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    options = ["--hardware", "rtx3090", "--no-compile", "--batch", "2", "--sequence", "16", "--json"]

    def planned() -> dict[str, Any]:
        capsys.readouterr()
        assert main(["plan", str(folder), *options]) == 0
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)["plan"]
        return plan

    whole = planned()
    assert whole["tokens"] == 32
    (folder / "tokenizer.json").write_text("{}")  # it cannot be read
    assert planned() == whole
    words = tokenizers.models.WordLevel({f"word{number}": number for number in range(300)}, unk_token="word0")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    tokenizer.save_pretrained(folder)  # it has more tokens than the model has embeddings
    assert planned() == whole
    with pytest.raises(ValueError, match=f"^{folder} has 256 embeddings and its tokens need 300: put the tokenizer"):
        load_model(str(folder))
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert planned() == whole
    capsys.readouterr()
    command = ["train", "--model", str(folder), "--data", __file__, "--device", "cpu"]
    assert main([*command, "--folder", str(tmp_path / "run")]) == 2
    said = (
        f"protrain train: {folder} holds no safetensors: save the weights with save_pretrained first, or give "
        "--from-scratch for random ones\n"
    )
    assert capsys.readouterr().err == said


def test_the_folder_of_a_run_says_where_its_model_is(folder: Path) -> None:
    with pytest.raises(ValueError, match=f"is no model but holds one: give {folder}$"):
        load_model(str(folder.parent))
