"""Times of steps if each step has a save or an evaluation after it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import protrain
from protrain.cli.main import main
from protrain.cli.training_run import Run

pytest.importorskip("transformers")

STEPS = 8
PAUSE_S = 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "slow"),
    [("--checkpoint-every=1 --evaluate-every=0", "save"), ("--checkpoint-every=0 --evaluate-every=1", "evaluate")],
    ids=["saves", "evaluations"],
)
def test_steps_that_stand_alone_have_a_time_without_what_follows(
    options: str, slow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(run: Run) -> Any:
        time.sleep(PAUSE_S)
        return do(run)

    do, wait, waited = getattr(Run, slow), Run.wait_for_updates, []

    def counted_wait(run: Run) -> None:
        wait(run)
        waited.append(run.step)

    monkeypatch.setattr(Run, slow, slowly)
    monkeypatch.setattr(Run, "wait_for_updates", counted_wait)
    summary = _train(tmp_path, options)
    assert waited == list(range(2, STEPS + 1)), "the first step warms up"
    assert 0 < summary["step_ms"] < PAUSE_S * 1000
    assert summary["tokens_per_s"] == pytest.approx(16 / summary["step_ms"] * 1000)
    assert summary["steps_alone"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step_ms"] for row in steps] == [None] * STEPS
    assert all(row["tokens_per_s"] == pytest.approx(16 / row["alone_ms"] * 1000) for row in steps[1:])
    said = " ".join(capsys.readouterr().out.split())
    assert " tokens/s in steps that each stood alone, plan " in said


@pytest.mark.slow
def test_updates_on_the_host_are_in_the_time_of_a_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "wait_for_updates", lambda run: time.sleep(PAUSE_S / 4))
    assert _train(tmp_path, "--checkpoint-every=0 --evaluate-every=1")["step_ms"] >= PAUSE_S / 4 * 1000


@pytest.mark.slow
def test_steps_among_others_are_timed_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Run, "wait_for_updates", lambda run: waited.append(run.step))
    summary = _train(tmp_path, "--checkpoint-every=3 --evaluate-every=2")
    assert waited == [3, 4], "of all others one neighbour follows, or goes before, without a pause"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = {row["step"]: row["step_ms"] for row in rows if row.get("step_ms") is not None}
    assert list(times) == [2, 6, 8]
    assert summary["step_ms"] in times.values()
    assert not summary["steps_alone"]


def test_writing_a_trace_is_in_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def slow_trace(*_: Any) -> Iterator[None]:
        yield
        time.sleep(PAUSE_S)
        written.append(True)

    written: list[bool] = []
    monkeypatch.setattr(protrain, "trace", slow_trace)
    _train(tmp_path, f"--checkpoint-every=0 --evaluate-every=0 --trace={tmp_path}/trace.json")
    assert written
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [row["step_ms"] for row in rows if row.get("step_ms") is not None]
    assert len(times) == STEPS - 2, "all but the first, and the one after the trace"
    assert max(times) < PAUSE_S * 1000


@pytest.mark.slow
def test_a_step_alone_after_resuming_does_not_stand_for_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(run: Run) -> float:
        raise RuntimeError("the machine failed")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "evaluate", interrupted)
        with pytest.raises(RuntimeError, match="the machine failed"):
            _train(tmp_path, "--checkpoint-every=6 --evaluate-every=7")
    assert main(["train", "--resume", "--folder", f"{tmp_path}/run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("alone_ms") is not None] == [8]
    assert not summary["steps_alone"]
    assert summary["step_ms"] in [row["step_ms"] for row in rows if row.get("step_ms") is not None]


def _train(folder: Path, options: str) -> dict[str, Any]:
    (folder / "text.txt").write_text("some text " * 100)
    command = [
        f"--model=tiny --device=cpu --batch=1 --sequence=16 --steps={STEPS} --warmup=0 --folder={folder}/run",
        f"--data={folder}/text.txt --no-model --sample-tokens=0 --evaluation-batches=1 --threads=1 {options}",
    ]
    assert main(["train", *" ".join(command).split()]) == 0
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary
