"""`--load-in-4bit` with `--lora` (QLoRA): trained as peft's own loop does, resumed, exported, merged and planned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.checkpoint.manifest import list_saves
from protrain.cli.codec import Codec
from protrain.cli.data import training_batch
from protrain.cli.main import main
from protrain.cli.text import tokenize

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

ADAPTER = "adapter_model.safetensors"


def train(workplace: Path, folder: Path, *more: str) -> list[str]:
    options = ["--model", "base", "--data", "text.txt", "--device", "cpu", "--threads", "1", "--sample-tokens", "0"]
    options += ["--batch", "4", "--sequence", "32", "--steps", "6", "--checkpoint-every", "3", "--warmup", "0"]
    options += ["--learning-rate", "0.01", "--min-learning-rate", "1", "--device-memory", "1100KiB"]
    found = [str(workplace / word) if word in ("base", "text.txt") else word for word in options]
    return ["train", *found, "--folder", str(folder), "--lora", "r=4,alpha=8", "--load-in-4bit", *more]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, llama_folder: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("qlora")
    base = llama_folder(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    (folder / "base").symlink_to(base)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return folder


@pytest.fixture(scope="module")
def finished(workplace: Path) -> Path:
    assert main(train(workplace, workplace / "finished")) == 0
    return workplace / "finished"


def in_4bit(workplace: Path) -> Any:
    """The base as transformers' users load it for QLoRA."""
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(workplace / "base", quantization_config=how, device_map="cpu", dtype=torch.float32)


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_losses_and_adapter_are_those_of_pefts_own_loop(finished: Path, workplace: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    assert main(train(workplace, start, "--learning-rate", "0", "--steps", "1")) == 0
    model = peft.PeftModel.from_pretrained(in_4bit(workplace), start / "model", is_trainable=True).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = tokenize([workplace / "text.txt"], Codec(), tmp_path, held_out=0.05)
    expected = []
    for step in range(6):
        batch = training_batch(tokens, seed=0, step=step, batch=4, sequence=32, micro_batch=0, micro_batches=1)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(finished) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0] - 0.1
    found = peft.PeftModel.from_pretrained(in_4bit(workplace), finished / "model").state_dict()
    for name, value in model.state_dict().items():
        if "lora_" in name:
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_adapter_and_its_saves_refer_to_the_base(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(finished, folder)
    shutil.rmtree(list_saves(folder / "checkpoints")[-1])
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    assert main(["train", "--resume", "--folder", str(folder), "--device-memory", "4MiB"]) == 0
    assert (folder / "model" / ADAPTER).read_bytes() == (finished / "model" / ADAPTER).read_bytes()
    summary = json.loads((finished / "summary.json").read_text())
    adapter = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
    assert summary["trained_parameters"] == adapter
    assert summary["parameters"] == adapter + 2 * 256 * 64 + 5 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128)
    saved_bytes = sum(path.stat().st_size for path in list_saves(finished / "checkpoints")[-1].glob("*.safetensors"))
    assert saved_bytes == pytest.approx(12 * adapter, rel=0.2), "master and moments of the adapter, and no base"


@pytest.mark.slow
def test_an_evaluation_before_more_training_changes_nothing(
    finished: Path, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(*_: Any) -> None:
        raise AssertionError("the weights would be packed for a CPU's products, in which no training goes on")

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    monkeypatch.setattr("bitsandbytes.nn.modules._convert_weight_packed_for_cpu", pack)
    assert main(train(workplace, tmp_path / "run", "--evaluate-every", "2")) == 0
    assert (tmp_path / "run" / "model" / ADAPTER).read_bytes() == (finished / "model" / ADAPTER).read_bytes()


def test_exports_are_the_adapter_or_its_sum_with_the_weights_before_they_were_quantised(
    finished: Path, workplace: Path, tmp_path: Path
) -> None:
    assert main(["export", str(finished), str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / ADAPTER).read_bytes() == (finished / "model" / ADAPTER).read_bytes()
    assert main(["export", str(finished), str(tmp_path / "merged"), "--merge"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(workplace / "base")
    expected = peft.PeftModel.from_pretrained(base, finished / "model").merge_and_unload().state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
def test_a_plan_counts_4bit_weights(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "gpt2", "--hardware", "h100", "--batch", "1", "--sequence", "8", "--no-compile"]
    sizes = {}
    for way in ((), ("--load-in-4bit",)):
        assert main([*plan, "--no-chunked-loss", "--lora", "r=16", "--json", *way]) == 0
        sizes[way] = json.loads(capsys.readouterr().out)["plan"]["device_bytes"]
    quantised = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    saved_bytes = quantised * (2 - 0.5 - 1 / 64 - 4 / 64 / 256)
    at_work_bytes = 2 * 2 * 768 * 3072  # a product takes its weight in 16 bits, and transposed
    assert sizes[()] - sizes["--load-in-4bit",] == pytest.approx(saved_bytes - at_work_bytes, rel=0.02)
    assert main([*plan, "--no-chunked-loss", "--lora", "r=16", "--load-in-4bit"]) == 0
    assert "and 41.8 MiB of 4-bit weights" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--merge",), "`protrain export FOLDER MERGED --merge` adds the adapter"),
        (("--model", "tiny", "--no-model"), "--load-in-4bit quantises the weights of a folder"),
        (("--from-scratch", "--no-model"), "--load-in-4bit quantises the weights of a folder"),
    ],
)
def test_what_cannot_be_done_is_said(
    options: tuple[str, ...], message: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(train(workplace, tmp_path / "run", *options)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [("train",), ("plan", "--hardware", "h100")])
def test_4bit_weights_need_an_adapter(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "tiny"] if command[0] == "train" else ["tiny"]
    assert main([command[0], *model, *command[1:], "--load-in-4bit"]) == 2
    assert "add an adapter to train, like --lora r=16" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["bitsandbytes", "accelerate"])
def test_a_missing_package_is_named_with_what_installs_it(
    package: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    assert main(train(workplace, tmp_path / "run")) == 2
    assert f"needs the package {package}: pip install 'protrain[qlora]'" in capsys.readouterr().err


def test_a_folder_that_lacks_weights_is_refused(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(workplace / "base", tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert main([*train(workplace, tmp_path / "run"), "--model", str(tmp_path / "base")]) == 2
    assert "lacks 1 of 21 parameters, among them model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
