"""`--config`: a YAML file says what options would, and options on the command line win."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from protrain.cli.commands import build_parser

pytest.importorskip("yaml")

OPTIONS = """\
model: tiny
steps: 30
learning-rate: 1e-4
device-memory: 24GiB
freeze: ['*norm*', model.embed_tokens.weight]
compile: false
no-model: true
json: true
merge: false
"""


def parsed(*words: str) -> dict[str, Any]:
    found = vars(build_parser("train").parse_args(["train", *words]))
    return {name: value for name, value in found.items() if name not in ("command", "config")}


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(OPTIONS)
    return str(path)


def test_a_file_says_what_options_say(job: str) -> None:
    words = ["--model", "tiny", "--steps", "30", "--learning-rate", "1e-4", "--device-memory", "24GiB", "--json"]
    words += ["--freeze", "*norm*", "--freeze", "model.embed_tokens.weight", "--no-compile", "--no-model"]
    assert parsed("--config", job) == parsed(f"--config={job}") == parsed(*words)


def test_options_of_the_command_line_win(job: str) -> None:
    found = parsed("--steps=9", "--freeze", "lm_head.*", "--config", job, "--compile")
    assert found == {**parsed("--config", job), "steps": 9, "freeze": ["lm_head.*"], "compile": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: 1", "'learning_rate' is no option; did you mean learning-rate?"),
        ("wurmup: 1", "'wurmup' is no option; did you mean warmup?"),
        ("config: other.yaml", "'config' is no option"),
        ("compile: 1", "compile must be true or false, not 1"),
        ("steps: true", "steps must be a number or text, not True"),
        ("steps: {a: 1}", "steps must be a number or text, not {'a': 1}"),
        ("steps:", "steps must be a number or text, not None"),
        ("steps: [1, 2]", "steps must be a number or text, not [1, 2]"),
        ("steps: many", "argument --steps: must be a whole number, not 'many'"),
        ("- steps", "must have a line for each option, like 'steps: 1000'"),
        ("a: b: c", "is no YAML"),
        ("steps: 1\nbatch: 2\nsteps: 3", "line 3 has steps, and line 1 has steps, which is the same option"),
        ("\nseq: 16\nsequence: 32", "line 3 has sequence, and line 2 has seq, which is the same option"),
        ("compile: true\nno-compile: true", "line 2 has no-compile, and line 1 has compile"),
        ("{steps: 1, steps: 2}", "line 1 has steps"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_file_is_one_error(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parsed("--config", str(path))
    error = capsys.readouterr().err
    assert error.startswith("protrain train: ")
    assert said in error


def test_without_yaml_the_error_says_what_to_install(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SystemExit, match="2"):
        parsed("--config", job)
    assert "--config needs the package PyYAML: pip install 'protrain[hf]'" in capsys.readouterr().err
