"""Which options of a run a resumed run may change, and which it may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protrain.cli.job import TrainJob, resume, start
from protrain.cli.run_files import JOB_FILE, LOCK_FILE, PLAN_FILE, RESULTS, UNFINISHED_DATA


def test_a_resumed_run_takes_its_own_options_and_new_placement(tmp_path: Path) -> None:
    start(tmp_path, {"model": "tiny", "steps": 50, "seed": 3}).save(tmp_path / JOB_FILE)
    job = resume(tmp_path, {"device_memory": "1GiB", "steps": 50})
    assert job == TrainJob(model="tiny", steps=50, seed=3, device_memory="1GiB", micro_batches=1)


def test_a_resumed_run_refuses_what_would_change_its_result(tmp_path: Path) -> None:
    start(tmp_path, {"model": "tiny", "steps": 50}).save(tmp_path / JOB_FILE)
    with pytest.raises(ValueError, match=r"--learning-rate 0\.1 differs from the default of the run"):
        resume(tmp_path, {"learning_rate": 0.1})


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    start(tmp_path, {"model": "tiny"}).save(tmp_path / JOB_FILE)
    with pytest.raises(ValueError, match="continue it with --resume"):
        start(tmp_path, {"model": "tiny"})


def test_a_run_is_continued_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, other, run = tmp_path / "begun", tmp_path / "other", tmp_path / "run"
    for folder in (begun / "source", other, run):
        folder.mkdir(parents=True)
    (begun / "text.txt").touch()
    monkeypatch.chdir(begun)
    job = replace(start(run, {"model": "source", "data": "text.txt"}), micro_batches=1)
    assert (job.model, job.data) == (str(begun / "source"), str(begun / "text.txt"))
    job.save(run / JOB_FILE)
    for place in (begun, other):
        monkeypatch.chdir(place)
        for model in ("source", "./source", str(begun / "source"), "../begun/source"):
            assert resume(run, {"model": model, "data": "text.txt"}) == job
    with pytest.raises(ValueError, match=r"--data other\.txt differs from /.*begun/text\.txt of the run"):
        resume(run, {"data": "other.txt"})
    (other / "text.txt").touch()
    with pytest.raises(ValueError, match=r"--data /.*other/text\.txt differs from /.*begun/text\.txt of the run"):
        resume(run, {"data": "text.txt"})

    begun.rename(tmp_path / "moved")
    moved = resume(run, {"model": str(tmp_path / "moved" / "source"), "data": "text.txt"})
    assert (moved.model, moved.data) == (str(tmp_path / "moved" / "source"), str(other / "text.txt"))
    with pytest.raises(ValueError, match="--model tiny differs from"):
        resume(run, {"model": "tiny"})


def test_a_named_shape_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    start(tmp_path, {"model": "tiny"}).save(tmp_path / JOB_FILE)
    assert resume(tmp_path, {"model": "tiny"}).model == "tiny"
    with pytest.raises(ValueError, match=r"--model /.*/tiny differs from tiny of the run"):
        resume(tmp_path, {"model": "./tiny"})


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_run_would_overwrite_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path} holds {name}, which belongs to no run .*: give another --folder"):
        start(tmp_path, {"model": "tiny"})


def test_a_plan_may_lie_where_the_run_writes_it(tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).touch()
    start(tmp_path, {"model": "tiny", "plan": str(tmp_path / PLAN_FILE)})


def test_what_a_killed_start_leaves_is_in_nobody_s_way(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).touch()
    (tmp_path / UNFINISHED_DATA).mkdir()
    (tmp_path / UNFINISHED_DATA / "train.bin").touch()
    start(tmp_path, {"model": "tiny"})


def test_a_learning_rate_of_nothing_is_one() -> None:
    assert TrainJob(model="tiny", learning_rate=0.0).peak_learning_rate(0.003) == 0.0
    assert TrainJob(model="tiny").peak_learning_rate(0.003) == 0.003


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the folder of the text"):
        start(tmp_path, {"model": "tiny", "data": str(tmp_path)})
    with pytest.raises(ValueError, match="holds no run"):
        resume(tmp_path, {})
    with pytest.raises(ValueError, match="--model is missing"):
        start(tmp_path, {})
    with pytest.raises(ValueError, match="give --clip 0"):
        start(tmp_path, {"model": "tiny", "step_during_backward": True})
    with pytest.raises(ValueError, match="--step-during-backward does not go with --dtype float16"):
        start(tmp_path, {"model": "tiny", "step_during_backward": True, "clip": 0.0, "dtype": "float16"})
    with pytest.raises(ValueError, match="--warmup 20 is longer than the run: give at most --steps, which is 10"):
        start(tmp_path, {"model": "tiny", "steps": 10, "warmup": 20})
