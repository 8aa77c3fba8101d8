"""`--lora` and `--freeze`: what a plan trains, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.cli.main import main
from protrain.cli.models import choose_trained, read_architecture
from protrain.cli.options import parse_lora

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
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert not torch.allclose(base(**BATCH).logits, expected, atol=1e-2)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(adapted(**BATCH).logits, expected)


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
    usual = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "lora_dropout": 0.0}
    assert parse_lora("r=8") == {**usual, "r": 8}
    own = {"lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    assert parse_lora("alpha=4,targets=q_proj+v_proj,dropout=0.1") == {**usual, **own}
    model = choose_trained(read_architecture("tiny"), "r=2,targets=q_proj+v_proj", ()).model
    trained = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"base_model.model.model.layers.{i}.self_attn.{part}_proj" for i in range(4) for part in "qv"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "rank=16"], "'rank=16' is not made of r=N, alpha=N, targets=NAMES and dropout=P"),
        (["--lora", "r=many"], "'r=many' is not made of r=N"),
        (["--lora", "r=0"], "`r` should be a positive integer"),
        (
            ["--lora", "r=4,targets=qproj"],
            "Target modules {'qproj'} not found in the base model",
        ),
        (["--lora", "r=4,targets=embed_tokens"], "model.embed_tokens is no linear layer"),
        (
            ["--freeze", "model.layer.*"],
            "--freeze 'model.layer.*' matches no parameter; there are model.",
        ),
        (["--freeze", "*"], "--freeze leaves nothing to train"),
    ],
)
def test_what_cannot_be_done_is_said(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["plan", "tiny", "--hardware", "h100", "--no-compile", *options])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


def test_experts_get_no_adapter(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.\S+ is no linear layer, .*: give targets"):
        choose_trained(read_architecture(str(tmp_path)), "r=2", ())
    choose_trained(read_architecture(str(tmp_path)), "r=2,targets=q_proj", ())


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"--lora needs the package peft: pip install 'protrain\[peft\]'"):
        choose_trained(read_architecture("tiny"), "r=2", ())
