"""A run whose checkpoints and model do not fit on the disk says so before it trains."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from protrain.checkpoint.manifest import list_saves
from protrain.cli.main import main

pytest.importorskip("transformers")


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.suffix == ".safetensors")


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ([], 3),
        (["--checkpoint-every", "1", "--keep", "1"], 2),  # the new one is written beside the old one
        (["--checkpoint-every", "1"], 3),
        (["--checkpoint-every", "0"], 0),
        (["--lora", "r=16"], 3),
        (["--lora", "r=16", "--merge", "--checkpoint-every", "2", "--keep", "1", "--dtype", "bfloat16"], 2),
        (["--freeze", "model.embed_tokens.*", "--dtype", "bfloat16", "--no-model"], 3),
    ],
    ids=str,
)
def test_what_a_run_will_write_is_known_before(
    options: list[str],
    saves: int,
    tmp_path: Path,
    llama_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--lora" in options:
        pytest.importorskip("peft")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    source = llama_folder(hidden_size=128, intermediate_size=512, num_hidden_layers=2)
    words = ["train", "--model", str(source), "--data", str(tmp_path / "text.txt"), "--device", "cpu", "--batch", "1"]
    words += ["--sequence", "16", "--steps", "4", "--sample-tokens", "0", *options, "--folder"]
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert main([*words, str(tmp_path / "run")]) == 0
    said = re.search(
        r"run has 0 B free, and checkpoints and model of the run take ([\d.]+) (\w+): ", capsys.readouterr().err
    )
    one = list_saves(tmp_path / "run" / "checkpoints")[-1:]
    taken = saves * sum(map(size_bytes, one)) + size_bytes(tmp_path / "run" / "model")
    assert said is not None
    told = float(said[1]) * {"KiB": 2**10, "MiB": 2**20}[said[2]]
    assert told == pytest.approx(taken, rel=0.05, abs=16 * 2**10)  # beside the headers of files

    free = 2 * taken
    assert main([*words, str(tmp_path / "roomy")]) == 0
    assert "free, and checkpoints" not in capsys.readouterr().err
