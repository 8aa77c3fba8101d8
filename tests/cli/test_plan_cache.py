"""`protrain plan` for another machine builds no model whose counted profile it has kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from protrain.cli.main import main

pytest.importorskip("transformers")

PLAN = ["--hardware", "rtx3090", "--batch", "2", "--sequence", "32", "--no-compile", "--json"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_repeated_plan_is_the_same_without_transformers_and_another_model_is_counted_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config

    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64).save_pretrained(folder)
    ways: list[list[str]] = [[], ["--accumulation", "2"], ["--batch", "3"], ["--sequence", "16"]]
    ways += [["--lora", "r=2"], ["--freeze", "*wte*"]]
    first = [plan(capsys, str(folder), *PLAN, *way) for way in ways]
    assert len({json.loads(text)["parameters"] for text in first}) == 2, "an adapter adds some"
    assert len(set(first)) == len(ways)
    kept = list((tmp_path / "cache" / "profiles").iterdir())
    assert len(kept) == len(ways) - 1, "one file for what is counted, which is the same for more batches in a step"

    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it now fails
    assert [plan(capsys, str(folder), *PLAN, *way) for way in ways] == first
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"n_layer": 2', '"n_layer": 3'))
    for words in ([str(folder), *PLAN], [str(folder), *PLAN, "--dtype", "float32"], ["tiny", *PLAN]):
        assert main(["plan", *words]) == 2
        assert "a model needs the package transformers" in capsys.readouterr().err
