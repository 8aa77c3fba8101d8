"""--moment-dtype: a plan shows it, and a run keeps it to its end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from protrain.cli.main import main
from protrain.planning import Plan

pytest.importorskip("transformers")

PLAN = ["plan", "tiny", "--hardware", "rtx3090", "--batch=2", "--sequence=32", "--device-memory=134MiB"]
TRAIN = ["train", "--model=tiny", "--device=cpu", "--batch=1", "--sequence=16", "--steps=4", "--checkpoint-every=2"]
TRAIN += ["--evaluate-every=0", "--evaluation-batches=1", "--sample-tokens=0", "--no-model", "--threads=1"]
NARROW = "--moment-dtype=bfloat16"


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def unfinished(run: Path, folder: Path) -> Path:
    """A copy of ``run`` as it was when half of its steps were done."""
    shutil.copytree(run, folder)
    (folder / "summary.json").unlink()
    (last,) = (folder / "checkpoints").glob("*-step-4")
    shutil.rmtree(last)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs, by their options."""
    folder = tmp_path_factory.mktemp("moments")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    found = {"": folder / "whole", NARROW: folder / "narrow"}
    for options, run in found.items():
        assert main([*TRAIN, f"--data={folder / 'text.txt'}", f"--folder={run}", *options.split()]) == 0
    return found


@pytest.mark.slow
def test_where_nothing_fits_it_is_a_remedy_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*PLAN, "--host-memory=22MiB"]
    assert main(argv) == 2
    assert "; so does --moment-dtype bfloat16, with Adam's moments in 16 bits" in capsys.readouterr().err
    assert main([*argv, NARROW]) == 0
    assert ", moments in bfloat16 step " in " ".join(capsys.readouterr().out.split())
    assert main([*argv, NARROW, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["moment_dtype"] == "bfloat16"


@pytest.mark.slow
def test_a_run_keeps_it(runs: dict[str, Path], tmp_path: Path) -> None:
    """This holds also when it goes on under another plan."""
    narrow = runs[NARROW]
    folder = unfinished(narrow, tmp_path / "run")
    assert main(["train", "--resume", f"--folder={folder}", "--device-memory=20MiB"]) == 0
    plans = [Plan.load(run / "plan.json") for run in (narrow, folder)]
    assert [plan.moment_dtype for plan in plans] == ["bfloat16"] * 2
    assert plans[0].n_persist > plans[1].n_persist
    assert losses(folder) == losses(narrow) != losses(runs[""])


@pytest.mark.slow
def test_a_run_cannot_change_it(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unfinished(runs[NARROW], tmp_path / "narrow")
    assert main(["train", "--resume", f"--folder={folder}", "--moment-dtype=float32"]) == 2
    assert "--moment-dtype float32 differs from bfloat16 of the run" in capsys.readouterr().err
    folder = unfinished(runs[""], tmp_path / "older")
    job = json.loads((folder / "job.json").read_text())
    del job["moment_dtype"]  # as before the option existed
    (folder / "job.json").write_text(json.dumps(job))
    assert main(["train", "--resume", f"--folder={folder}", NARROW]) == 2
    assert "--moment-dtype bfloat16 differs from float32 of the run" in capsys.readouterr().err
    assert main(["train", "--resume", f"--folder={folder}"]) == 0
    assert losses(folder) == losses(runs[""])
