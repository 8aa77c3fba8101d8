"""`--lora`, `--freeze` and `--load-in-4bit`: what a plan trains, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protrain.cli.main import main
from protrain.cli.models import choose_trained, read_architecture
from protrain.cli.options import parse_lora
from tests.cli.test_main import run
from tests.tiny_models import tiny_config

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


GPT2 = ["plan", "gpt2", "--hardware", "h100", "--batch", "1", "--sequence", "8", "--no-compile", "--no-chunked-loss"]


@pytest.mark.slow
def test_a_plan_counts_two_bytes_for_a_frozen_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, "--lora", "r=16", "--out", str(tmp_path / "plan.json")]) == 0
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
        (["--lora", "r=4,targets=qproj"], "Target modules {'qproj'} not found in the base model"),
        (["--lora", "r=4,targets=embed_tokens"], "model.embed_tokens is no linear layer"),
        (["--freeze", "model.layer.*"], "--freeze 'model.layer.*' matches no parameter; there are model."),
        (["--freeze", "*"], "--freeze leaves nothing to train"),
    ],
)
def test_what_cannot_be_done_is_said(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "plan", "tiny", "--hardware", "h100", "--no-compile", *options)
    assert status == 2
    assert message in err


def test_experts_get_no_adapter(tmp_path: Path) -> None:
    tiny_config("mixtral", {}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.\S+ is no linear layer, .*: give targets"):
        choose_trained(read_architecture(str(tmp_path)), "r=2", ())
    choose_trained(read_architecture(str(tmp_path)), "r=2,targets=q_proj", ())


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"--lora needs the package peft: pip install 'protrain\[peft\]'"):
        choose_trained(read_architecture("tiny"), "r=2", ())


# -- weights in 4 bits -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_counts_4bit_weights(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    sizes = {}
    for way in ((), ("--load-in-4bit",)):
        assert main([*GPT2, "--lora", "r=16", "--json", *way]) == 0
        sizes[way] = json.loads(capsys.readouterr().out)["plan"]["device_bytes"]
    quantised = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    saved_bytes = quantised * (2 - 0.5 - 1 / 64 - 4 / 64 / 256)
    at_work_bytes = 2 * 2 * 768 * 3072  # a product takes its weight in 16 bits, and transposed
    assert sizes[()] - sizes["--load-in-4bit",] == pytest.approx(saved_bytes - at_work_bytes, rel=0.02)
    assert main([*GPT2, "--lora", "r=16", "--load-in-4bit"]) == 0
    assert "and 41.8 MiB of 4-bit weights" in " ".join(capsys.readouterr().out.split())


def test_4bit_weights_need_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    assert main(["plan", "tiny", "--hardware", "h100", "--load-in-4bit"]) == 2
    assert "add an adapter to train, like --lora r=16" in capsys.readouterr().err
