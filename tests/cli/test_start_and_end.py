"""What a short command spends no time on: garbage collection during and after imports, and freeing torch at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import protrain

ROOT = Path(protrain.__file__).parents[1]


def python(*words: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)


IMPORTING = """
import gc, sys
from protrain.cli.imports import importing
with importing():
    inside = gc.isenabled()
print(inside, gc.isenabled(), gc.get_freeze_count() > 0)
try:
    with importing():
        import wave, nothing_of_that_name
except ImportError:
    print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_collections_of_the_program_leave_out_what_was_imported_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "protrain").write_text(IMPORTING)
    done = python(str(tmp_path / "protrain"))
    assert done.stdout.splitlines() == ["False True False", "True True"], done.stderr


def test_a_process_that_calls_the_command_line_collects_as_before() -> None:
    done = python("-c", IMPORTING)
    assert done.stdout.splitlines() == ["True True False", "True False"], done.stderr


MODELS = """
import gc, weakref
import torch
import protrain
from protrain.cli.models import load_model

def trained():
    model = load_model("tiny", layers=2).model
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 8, dtype=torch.long)
    model, optimizer = protrain.wrap(model, optimizer, device="cpu", device_memory="64MiB", compile=False)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return weakref.ref(model)

for model in [trained(), trained()]:
    gc.collect()
    print(model() is None)
"""


@pytest.mark.slow
def test_a_model_is_freed_though_its_code_was_imported_while_it_was_made() -> None:
    done = python("-c", MODELS)
    assert done.stdout.splitlines()[-2:] == ["True", "True"], done.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        pytest.param(["tiny", "--hardware=rtx3090", "--seq=32", "--no-compile", "--json"], 0, marks=pytest.mark.slow),
        (["a-model-that-is-nowhere", "--hardware", "rtx3090"], 2),
    ],
)
def test_a_plan_says_all_and_then_leaves_at_once(words: list[str], status: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'cleaned up')\n")
    done = python("-m", "protrain", "plan", *words, path=tmp_path)
    assert done.returncode == status
    if status:
        assert done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith("protrain plan: there is no model 'a-model-that-is-nowhere'")
    else:
        assert json.loads(done.stdout)["fits"] is True
        assert "leaked" not in done.stderr
    assert "cleaned up" in python("-m", "protrain", "--version", path=tmp_path).stdout, "other commands end as usual"
