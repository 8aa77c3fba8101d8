"""A finished run goes on with more steps, and a logger goes on with its curve."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protrain.checkpoint.manifest import list_saves
from protrain.cli.main import main
from tests.cli.test_lora import arguments, workplace  # noqa: F401 - a fixture

pytest.importorskip("transformers")


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "loss" in row]


@pytest.fixture(scope="module")
def short(workplace: Path) -> Path:  # noqa: F811
    folder = workplace / "short"
    assert main(arguments(workplace, folder, "--logger", "tensorboard", "--evaluate-every", "3")) == 0
    return folder


@pytest.mark.slow
def test_a_finished_run_goes_on_at_the_rates_of_the_longer_one(
    short: Path,
    workplace: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    before = (folder / "model" / "model.safetensors").read_bytes()
    assert main(["train", "--folder", str(folder), "--steps", "10"]) == 0
    assert main(arguments(workplace, tmp_path / "whole", "--steps", "10")) == 0
    longer, whole = rows(folder), rows(tmp_path / "whole")
    assert [row["step"] for row in longer] == list(range(1, 11))
    assert [row["loss"] for row in longer[:6]] == [row["loss"] for row in rows(short)]
    rates = [row["learning_rate"] for row in longer]
    assert rates[5] == pytest.approx(0.001), "the least of a run of 6 steps"
    assert rates[6:] == pytest.approx([row["learning_rate"] for row in whole[6:]])
    assert longer[6]["loss"] < longer[0]["loss"]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 10
    assert (folder / "model" / "model.safetensors").read_bytes() != before
    capsys.readouterr()
    assert main(["train", "--folder", str(folder), "--steps", "10"]) == 0
    assert "nothing to resume: all 10 steps" in capsys.readouterr().err


def test_the_first_added_step_is_taken_at_its_own_rate(short: Path, tmp_path: Path) -> None:

    from protrain.cli import job as jobs
    from protrain.cli.prepare import prepare

    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    run = prepare(jobs.resume(folder, {"steps": 10, "logger": None}), folder)
    warmup, last = 10 // 5, 10 - 1
    expected = 0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * (6 - warmup) / (last - warmup))) / 2)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_run_is_not_shortened_and_not_continued_without_a_save(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    assert main(["train", "--folder", str(folder), "--steps", "5"]) == 2
    assert "--steps 5 differs from 6 of the run" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints")
    assert main(["train", "--folder", str(folder), "--steps", "10"]) == 2
    assert "holds no save, and the run has reached step 6" in capsys.readouterr().err


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.mark.slow
def test_tensorboard_has_the_figures_and_a_resumed_run_its_curve(short: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    expected = [(row["step"], pytest.approx(row["loss"])) for row in rows(short)]
    assert curve(folder, "loss") == expected
    shutil.rmtree(list_saves(folder / "checkpoints")[-1])  # the run now goes on from step 3
    (folder / "summary.json").unlink()
    assert main(["train", "--resume", "--folder", str(folder)]) == 0
    assert curve(folder, "loss") == expected
    assert [step for step, _ in curve(folder, "evaluation_loss")] == [3, 6]


@pytest.mark.slow
def test_wandb_gets_one_run_for_all_parts(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, float]] = []

    def init(**options: Any) -> SimpleNamespace:
        begun.append(options)
        return SimpleNamespace(log=lambda figures, step: logged.append((step, figures.get("loss"))))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    for steps in ("7", "8"):
        assert main(["train", "--resume", "--folder", str(folder), "--steps", steps, "--logger", "wandb"]) == 0
    assert begun[0]["id"] == begun[1]["id"]
    assert [options["resume"] for options in begun] == ["allow"] * 2
    assert [each for each in logged if each[1] is not None] == [(r["step"], r["loss"]) for r in rows(folder)[6:]]


def test_a_logger_that_is_not_installed_is_named(
    workplace: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(arguments(workplace, tmp_path / "run", "--logger", "wandb")) == 2
    assert "--logger wandb needs the package wandb: pip install wandb" in capsys.readouterr().err
