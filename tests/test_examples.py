"""The scripts of examples/ train in miniature as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("ranks")  # which imports the same libraries as tests of integrations
EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, folder: Path, *arguments: str) -> Any:
    script = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    return script["main"](["--folder", str(folder), *arguments])


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    first, *_, last = losses(run("trainer", tmp_path, "--steps", "20", "--device-memory", "8MiB"))
    assert last < 0.9 * first
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_a_trainer_of_a_model_that_never_exists_whole(tmp_path: Path) -> None:
    """From the folder of another training, with a tokenizer beside its weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run("trainer", tmp_path / "model", "--steps", "10")
    words = pytest.importorskip("tokenizers")
    tokenizer = words.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["1 + 2 = 3"], vocab_size=256)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("12 + 30 = 42\n" * 200)
    trainer = run(
        "trainer", tmp_path / "longer", *f"--steps 10 --model {tmp_path / 'model'} --text {tmp_path / 'text'}".split()
    )
    assert losses(trainer)[0] < 6


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
