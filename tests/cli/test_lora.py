"""`--lora` and `--freeze`: what is trained, what is exported, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.checkpoint.manifest import list_saves, read_manifest
from protrain.cli.codec import Codec
from protrain.cli.data import evaluation_batches
from protrain.cli.lora import Lora, parse_lora
from protrain.cli.main import main
from protrain.cli.models import read_architecture
from protrain.cli.text import tokenize
from protrain.cli.trained import choose_trained
from protrain.common.adapters import adapter_names

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.arange(32).view(2, 16)
BATCH = {"input_ids": IDS, "labels": IDS}


def make(family: str) -> nn.Module:
    families: dict[str, dict[str, Any]] = {
        "mixtral": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2},
        "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    sizes = families[family]
    config = transformers.AutoConfig.for_model(
        family, vocab_size=256, **sizes, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, llama_folder: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(llama_folder(), folder / "source")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return folder


def arguments(workplace: Path, folder: Path, *more: str) -> list[str]:
    options = {
        "model": workplace / "source",
        "data": workplace / "text.txt",
        "folder": folder,
        "device": "cpu",
        "batch": 4,
        "sequence": 32,
        "steps": 6,
        "learning-rate": 0.01,
        "checkpoint-every": 3,
        "sample-tokens": 0,
        "threads": 1,
    }
    return ["train", *[part for name, value in options.items() for part in (f"--{name}", str(value))], *more]


LORA = ("--lora", "r=4,alpha=8,dropout=0.1", "--device-memory", "840KiB")  # weights pass through buffers


@pytest.fixture(scope="module")
def finished(workplace: Path) -> Path:
    folder = workplace / "finished"
    assert main(arguments(workplace, folder, *LORA)) == 0
    return folder


def held_out_loss(model: Any, workplace: Path, scratch: Path) -> float:
    tokens = tokenize([workplace / "text.txt"], Codec(), scratch, held_out=0.05)
    with torch.no_grad():
        batches = list(evaluation_batches(tokens, batch=4, sequence=32, count=8))
        losses = [float(model(**batch).loss) * len(batch["input_ids"]) for batch in batches]
    return sum(losses) / sum(len(batch["input_ids"]) for batch in batches)


@pytest.mark.slow
def test_the_adapter_loads_in_peft_and_is_the_trained_one(
    finished: Path, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(path.name for path in (finished / "model").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = transformers.AutoModelForCausalLM.from_pretrained(workplace / "source")
    model = peft.PeftModel.from_pretrained(base, finished / "model").eval()
    summary = json.loads((finished / "summary.json").read_text())
    assert main(["train", "--model", str(finished / "model"), "--data", __file__, "--device", "cpu"]) == 2
    assert "is an adapter and no model" in capsys.readouterr().err
    assert held_out_loss(model, workplace, tmp_path) == pytest.approx(summary["evaluation_loss"], rel=1e-5)
    assert summary["evaluation_loss"] < 5.5, "the untrained model has 5.6"
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.1)
    assert config.base_model_name_or_path == str(workplace / "source")
    shapes = 2 * 4 * sum(sum(pair) for pair in [(32, 32)] * 4 + [(32, 64)] * 3)
    assert summary["trained_parameters"] == shapes


@pytest.mark.slow
def test_a_resumed_run_has_the_same_adapter(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(finished, folder)
    shutil.rmtree(list_saves(folder / "checkpoints")[-1])
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    assert main(["train", "--resume", "--folder", str(folder), "--device-memory", "4MiB"]) == 0
    name = "model/adapter_model.safetensors"
    assert (folder / name).read_bytes() == (finished / name).read_bytes()


def saved_names(folder: Path) -> set[str]:
    """The names of the parameters in the newest checkpoint of a run."""
    files = read_manifest(list_saves(folder / "checkpoints")[-1])["files"]
    return {name for entry in files.values() for name in entry["parameters"]}


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_alone(finished: Path) -> None:
    with protrain.empty_parameters():
        model = choose_trained(read_architecture("tiny"), "r=4", ()).model
    layers = {name.split(".", 3)[3] for name in adapter_names(model)}
    assert saved_names(finished) == {f"model.layers.{layer}.{name}" for layer in range(2) for name in layers}


@pytest.mark.slow
def test_a_resumed_adapter_needs_the_model_that_it_was_trained_for(
    finished: Path, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, moved = tmp_path / "resumed", tmp_path / "moved"
    shutil.copytree(finished, folder)
    shutil.copytree(workplace / "source", moved)
    for path in (folder / "summary.json", *(folder / "model").iterdir()):
        path.unlink()
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps(job | {"model": str(moved)}))
    weights = moved / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for command in (
        ["train", "--resume", "--folder", str(folder)],
        ["export", str(folder), str(moved / "x"), "--merge"],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert f"those of {moved} are others: model.safetensors differs; give the model" in said
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["train", "--resume", "--folder", str(folder)]) == 0, "a base may be moved"
    name = "model/adapter_model.safetensors"
    assert (folder / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.slow
def test_the_random_base_of_a_shape_is_in_its_checkpoints(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ("--lora", "r=2", "--model", "tiny", "--no-model", "--steps", "1")
    assert main([*arguments(workplace, folder, *more)]) == 0
    assert "model.embed_tokens.weight" in saved_names(folder), "nothing else holds it"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["run", "export"])
def test_a_merged_model_is_what_peft_merges(how: str, finished: Path, workplace: Path, tmp_path: Path) -> None:
    if how == "run":
        assert main(arguments(workplace, tmp_path / "run", *LORA, "--merge")) == 0
        merged = tmp_path / "run" / "model"
    else:
        merged = tmp_path / "exported"
        assert main(["export", str(finished), str(merged), "--merge"]) == 0
        assert main(["export", str(finished), str(tmp_path / "adapter")]) == 0
        name = "adapter_model.safetensors"
        assert (tmp_path / "adapter" / name).read_bytes() == (finished / "model" / name).read_bytes()
    base = transformers.AutoModelForCausalLM.from_pretrained(workplace / "source")
    expected = peft.PeftModel.from_pretrained(base, finished / "model").merge_and_unload()
    found = transformers.AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_peft_model_of_the_users_own_loads_and_is_exported(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path / "source")  # type: ignore[operator]
    targets = ["q_proj", "v_proj"] if family == "mixtral" else "all-linear"
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM")
    with protrain.empty_parameters():
        model = peft.get_peft_model(make(family), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = protrain.wrap(
        model,
        torch.optim.AdamW(trained, lr=0.1),
        example_batch=BATCH,
        device="cpu",
        device_memory="1MiB",
        weights=tmp_path / "source",
        progress=False,
    )
    optimizer.backward(model(**BATCH).loss)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        expected = model(**BATCH).logits
    protrain.export(model, tmp_path / "adapter")
    protrain.export(model, tmp_path / "merged", merge=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert not torch.allclose(base(**BATCH).logits, expected, atol=1e-2)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(merged(**BATCH).logits, expected, atol=1e-5)
    assert torch.equal(adapted(**BATCH).logits, expected)


def test_frozen_parameters_keep_their_bits_and_others_change(workplace: Path, tmp_path: Path) -> None:
    patterns = ("--freeze", "model.layers.0.*", "--freeze", "*norm.weight")
    assert main(arguments(workplace, tmp_path / "run", *patterns)) == 0
    before = transformers.AutoModelForCausalLM.from_pretrained(workplace / "source").state_dict()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if ".layers.0." in name or name.endswith("norm.weight")}


@pytest.mark.slow
def test_a_plan_counts_two_bytes_for_a_frozen_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = [
        "plan",
        "gpt2",
        "--hardware",
        "h100",
        "--batch",
        "1",
        "--sequence",
        "8",
        "--no-compile",
        "--no-chunked-loss",
    ]
    assert main([*machine, "--lora", "r=16", "--out", str(tmp_path / "plan.json")]) == 0
    whole, adapter = 124_439_808, 12 * 16 * ((768 + 2304) + (768 + 768) + 2 * (768 + 3072))
    text = " ".join(capsys.readouterr().out.split())
    assert f"{whole + adapter:,} parameters ({adapter:,} trained)" in text
    states = 2 * whole + 16 * adapter
    beside = json.loads((tmp_path / "plan.json").read_text())["device_bytes"] - states
    assert 0 < beside < 140 * 2**20, "a margin of 128 MiB, 8 tokens and padding"
    assert main(["plan", "tiny", "--hardware", "h100", "--no-compile", "--freeze", "*.layers.*"]) == 0
    assert "(49,344 trained)" in " ".join(capsys.readouterr().out.split())  # the embedding and the last norm


def test_the_words_of_lora_are_read() -> None:
    assert parse_lora("r=8") == Lora(r=8, alpha=32, targets="all-linear", dropout=0.0)
    assert parse_lora("alpha=4,targets=q_proj+v_proj,dropout=0.1") == Lora(
        r=16, alpha=4, targets="q_proj+v_proj", dropout=0.1
    )
    model = choose_trained(read_architecture("tiny"), "r=2,targets=q_proj+v_proj", ()).model
    trained = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"model.layers.{i}.self_attn.{part}_proj" for i in range(4) for part in "qv"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "rank=16"], "'rank=16' is none of r=N, alpha=X, targets=NAMES and dropout=P"),
        (["--lora", "r=many"], "r=many: r must be a whole number"),
        (["--lora", "r=0"], "r and alpha must be at least 1"),
        (
            ["--lora", "r=4,targets=qproj"],
            "fits no layer of the model, whose linear layers are q_proj, k_proj, ",
        ),
        (["--lora", "r=4,targets=embed_tokens"], "model.embed_tokens is no linear layer"),
        (["--merge"], "--merge adds an adapter to the model, and there is none without --lora"),
        (
            ["--freeze", "model.layer.*"],
            "--freeze 'model.layer.*' matches no parameter; there are model.layers.1, ",
        ),
        (["--freeze", "*"], "--freeze leaves nothing to train"),
        (["--model", "tiny", "--lora", "r=4"], "give --merge to write the whole model, or --no-model"),
    ],
)
def test_what_cannot_be_done_is_said(
    options: list[str], message: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(arguments(workplace, tmp_path / "run", *options))
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "job.json").exists()


def test_experts_get_no_adapter(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.\S+ is no linear layer, .*: give targets"):
        choose_trained(read_architecture(str(tmp_path)), "r=2", ())
    choose_trained(read_architecture(str(tmp_path)), "r=2,targets=q_proj", ())


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"--lora needs the package peft: pip install 'protrain\[peft\]'"):
        choose_trained(read_architecture("tiny"), "r=2", ())
