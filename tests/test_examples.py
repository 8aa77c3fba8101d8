"""The scripts of examples/ train in miniature as they are."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import on_ranks

pytestmark = pytest.mark.xdist_group("examples")  # which import large libraries
EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path, *arguments: str) -> Any:
    script = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    return script["main"](["--folder", str(folder), *arguments])


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_pretraining_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """On a text of the user's own, after a training that ended at its second of three steps."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    text = tmp_path / "text"
    text.write_text("".join(f"{number} + {number} = {2 * number}\n" for number in range(2000)))
    options = ["--data", str(text), "--steps", "3", "--device", "cpu", "--save-every", "2"]
    whole = run("pretrain", tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole/checkpoints/00001-step-2", tmp_path / "resumed/checkpoints/00001-step-2")
    assert run("pretrain", tmp_path / "resumed", *options) == whole
    weights = [tmp_path / name / "model/model.safetensors" for name in ("whole", "resumed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (tmp_path / "whole/loss.png").stat().st_size > 0


def pretrain_on_rank(rank: int, folder: Path) -> Any:
    return run("pretrain", folder, "--device", "cpu", "--steps", "2", "--micro-batches", "2")


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")  # which shares the processes of the other tests of several ranks
def test_pretraining_has_the_same_bits_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    expected = pretrain_on_rank(0, tmp_path / "one")
    assert on_ranks(2, pretrain_on_rank, tmp_path / "two") == [expected] * 2
    weights = [tmp_path / name / "model/model.safetensors" for name in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    """Then one of a model that never exists whole, from that folder, with a tokenizer beside its weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    words = pytest.importorskip("tokenizers")
    model, text = tmp_path / "model", tmp_path / "text"
    first, *_, last = losses(run("trainer", model, "--steps", "20", "--device-memory", "8MiB"))
    assert last < 0.9 * first
    tokenizer = words.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["1 + 2 = 3"], vocab_size=256)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(model)
    text.write_text("12 + 30 = 42\n" * 200)
    trainer = run("trainer", tmp_path / "longer", "--steps", "10", "--model", str(model), "--text", str(text))
    assert losses(trainer)[0] < 6
    assert (tmp_path / "longer/model.safetensors").exists()


@pytest.mark.slow
def test_sft_lora(tmp_path: Path) -> None:
    for library in ("trl", "peft"):
        pytest.importorskip(library)
    first, *_, last = losses(run("sft_lora", tmp_path, "--steps", "20"))
    assert last < first
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_lightning_module(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    trainer = run("lightning_module", tmp_path, "--steps", "20")
    assert float(trainer.callback_metrics["loss"]) < 4
