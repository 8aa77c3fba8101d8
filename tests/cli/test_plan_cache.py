"""`protrain plan` for another machine builds no model whose counted profile it has kept, and imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import protrain
from protrain.cli.main import main
from protrain.hardware.shipped import load

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

    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it now fails
    assert [plan(capsys, str(folder), *PLAN, *way) for way in ways] == first
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"n_layer": 2', '"n_layer": 3'))
    for words in ([str(folder), *PLAN], [str(folder), *PLAN, "--dtype", "float32"], ["tiny", *PLAN]):
        assert main(["plan", *words]) == 2
        assert "a model needs the package transformers" in capsys.readouterr().err


WITHOUT_TORCH = """
import json, sys
sys.modules.update(dict.fromkeys(("torch", "triton", "transformers")))  # an import of one of them now fails
from protrain.cli.main import main
for words in json.loads(sys.argv[1]):
    if main(["plan", *words]):
        sys.exit(words)
"""


@pytest.mark.parametrize(
    "ways",
    [
        [["--hardware", "a100"], ["--hardware", "machine.json", "--json", "--out", "plan.json"]],
        pytest.param([["--hardware", "a100", "--explain"], ["--compare", "a100x1,h100x8x2"]], marks=pytest.mark.slow),
    ],
)
def test_a_repeated_plan_imports_no_torch(
    ways: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTRAIN_CACHE", "cache")
    monkeypatch.chdir(tmp_path)
    load("rtx3090").save("machine.json")
    step = ["tiny", "--batch", "2", "--sequence", "32", "--no-compile"]
    plans = [[*step, *way] for way in ways]
    first = "".join(plan(capsys, *words) for words in plans)
    assert len({file.read_bytes() for file in Path("cache", "profiles").iterdir()}) == 2, "of this batch and another"
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(plans)]
    environment = {**os.environ, "PYTHONPATH": str(Path(protrain.__file__).parents[1])}
    repeated = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert repeated.returncode == 0, repeated.stderr
    assert repeated.stdout == first
