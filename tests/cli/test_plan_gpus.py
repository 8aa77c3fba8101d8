"""`protrain plan --gpus`: a plan for several GPUs of one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protrain.planning import Plan
from tests.cli.test_plan import TINY, run

TIGHT = ["--device-memory", "800MiB", "--host-memory", "1GiB", "--no-compile"]


def test_several_gpus_share_the_states_and_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, out_file = tmp_path / "step.png", tmp_path / "plan.json"
    argv = [*TINY, *TIGHT, "--gpus", "4"]
    status, out, err = run(capsys, *argv, "--picture", str(picture), "--out", str(out_file))
    assert status == 0, err
    first, second, *rows = out.splitlines()
    assert "256 tokens a step" in first, "4 of 2 x 32"
    assert second == "4 GPUs, each with 1/4 of the states: fits"
    said = {row[:18].strip(): row[18:].strip() for row in rows[:9]}
    assert said["host memory a GPU"].endswith("of 256 MiB")
    assert said["GPU memory"].endswith("of 800 MiB")
    assert said["model states"].startswith("shards of")
    plan = Plan.load(out_file)
    assert plan.world_size == 4
    assert f"{4 * 64 / plan.step_ms * 1e3:,.0f} tokens/s" in said["step"]
    lanes = [line.split("  ")[0] for line in out.splitlines()]
    assert {"gathers", "reductions"} <= set(lanes)
    assert picture.stat().st_size > 0


def test_one_gpu_has_no_line_about_shards(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *TINY, *TIGHT)
    assert status == 0, err
    assert (status, out) == run(capsys, *TINY, *TIGHT, "--gpus", "1")[:2]
    assert "of the states" not in out
    assert "gathers" not in out
    assert "host memory  " in out


def test_other_answers_are_for_several_gpus_too(capsys: pytest.CaptureFixture[str]) -> None:
    two = [*TINY, *TIGHT, "--gpus", "2"]
    status, out, err = run(capsys, *two, "--frontier")
    assert status == 0, err
    assert "2 GPUs, each with 1/2 of the states" in out
    assert "host memory a GPU" in out
    points = json.loads(run(capsys, *two, "--frontier", "--json")[1])["points"]
    assert {point["plan"]["world_size"] for point in points} == {2}
    status, out, err = run(capsys, *two, "--explain")
    assert status == 0, err
    assert "device memory a GPU" in out


def test_a_number_of_gpus_is_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, *TINY, "--gpus", "0")
    assert status == 2
    assert "--gpus: must be at least 1, not 0" in err
