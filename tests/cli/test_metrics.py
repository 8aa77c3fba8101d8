"""The reports of a run."""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from protrain.cli.metrics import (
    DelayedRead,
    MetricsFile,
    ProgressLine,
    StepTimes,
    draw_loss_curve,
    peak_resident_bytes,
    quantile,
    resident_bytes,
)
from protrain.cli.run_files import METRICS_FILE


def test_a_resumed_file_forgets_steps_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path, resumed_step=0)
    for step in (1, 2, 3):
        first.add({"step": step, "loss": float(step)})
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"step": 4, "lo')
    resumed = MetricsFile(tmp_path, resumed_step=2)
    resumed.add({"step": 3, "loss": 30.0})
    resumed.add({"step": 3, "evaluation_loss": 1.0})
    assert resumed.losses() == {1: 1.0, 2: 2.0, 3: 30.0}
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == resumed.rows
    assert MetricsFile(tmp_path, resumed_step=0).rows == [], "a new run starts empty"


@pytest.mark.parametrize(
    "damage",
    [
        b"5",
        b"[1]",
        b"null",
        b'"step"',
        b"{}",
        b'{"step": "2"}',
        b'{"step": 2, "loss": "low"}',
        b'{"step": 2, "loss": null}',
        b'{"step": 2, "loss": 1.0, "step_ms": "fast"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda damage: repr(damage[:20]),
)
def test_a_damaged_line_ends_the_rows(damage: bytes, tmp_path: Path) -> None:
    rows = [b'{"step": 1, "loss": 4.0}', damage, b'{"step": 3, "loss": 2.0}']
    (tmp_path / METRICS_FILE).write_bytes(b"\n".join(rows))
    resumed = MetricsFile(tmp_path, resumed_step=3)
    assert resumed.rows == [{"step": 1, "loss": 4.0}]
    resumed.add({"step": 4, "loss": 1.0})
    assert [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()] == [1, 4]


def test_a_step_that_is_evaluated_again_has_one_row(tmp_path: Path) -> None:
    for evaluation_loss in (3.0, 2.0):
        file = MetricsFile(tmp_path, resumed_step=1)
        if not file.rows:
            file.add({"step": 1, "loss": 4.0})
        file.add({"step": 1, "evaluation_loss": evaluation_loss})
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert rows == file.rows == [{"step": 1, "loss": 4.0}, {"step": 1, "evaluation_loss": 2.0}]


def test_times_leave_out_pauses_and_the_first_steps() -> None:
    times = StepTimes()
    assert times.add(0.0) is None
    assert [times.add(ended) for ended in (9.0, 18.0, 19.0, 21.0)] == pytest.approx([9000, 9000, 1000, 2000])
    times.pause()
    assert times.add(500.0) is None
    assert times.add(503.0) == pytest.approx(3000)
    assert quantile([], 0.5) is None
    assert quantile([9, 7, 8], 0.5) == 8, "there are no others than the first"
    assert [quantile([9, 9, 9, 9, 9, 2, 1, 3], share) for share in (0.2, 0.5, 0.8)] == [1, 2, 3]


def test_a_step_alone_between_pauses_is_timed_from_its_begin() -> None:
    times = StepTimes()
    assert not times.is_alone, "the first step of all warms up"
    assert times.add(1.0) is None
    for begun in (10.0, 20.0, 30.0):
        times.pause()
        times.go_on(begun)
        assert times.is_alone
        assert times.alone_ms(begun + begun / 10) == pytest.approx(100 * begun)
        assert times.add(begun + 1) is None
    assert times.add(31.5) == pytest.approx(500)
    assert not times.is_alone


def test_the_times_of_a_resumed_run_are_told_from_those_of_earlier_processes(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path, resumed_step=0)
    for step, step_ms in ((1, None), (2, 20.0), (3, 30.0)):
        first.add({"step": step, "loss": 1.0, "step_ms": step_ms})
    resumed = MetricsFile(tmp_path, resumed_step=2)
    resumed.add({"step": 3, "loss": 1.0, "step_ms": 33.0})
    assert resumed.times_ms("step_ms", own=True) == [33.0]
    assert resumed.times_ms("step_ms", own=False) == [20.0, 33.0]
    assert resumed.times_ms("alone_ms", own=False) == []


def _read_late(device: torch.device) -> None:
    delayed = DelayedRead(device, 2)
    assert delayed.take() is None
    for step in (1, 2, 3):
        losses = [torch.tensor(part, device=device) for part in (0.5 * step, 3.0)]
        delayed.put(step, losses, torch.tensor(2.0, device=device))
        result = delayed.take()
        assert result is not None
        assert (result.step, result.losses, result.gradient_norm) == (step, (0.5 * step, 3.0), 2.0)
    delayed.put(4, [torch.tensor(1.0, device=device)] * 2, None)
    result = delayed.take()
    assert result is not None
    assert result.gradient_norm is None
    assert delayed.take() is None


def test_numbers_are_read_after_the_step() -> None:
    _read_late(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_are_read_after_the_step_on_a_gpu() -> None:
    _read_late(torch.device("cuda"))


def test_the_process_is_measured_in_bytes() -> None:
    before = resident_bytes()
    # These must be fresh pages, because an allocator may return memory that the process holds already.
    with mmap.mmap(-1, 64 * 1024**2) as block:
        block.write(b"1" * len(block))
        held = resident_bytes()
    assert held - before > 60 * 1024**2
    # the kernel counts pages per thread and adds them up only now and then
    assert peak_resident_bytes() >= held - 4 * 1024**2
    assert resident_bytes() < held - 30 * 1024**2


def test_a_line_of_progress_says_what_time_is_left_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = iter((100.0, 150.0, 200.0))
    monkeypatch.setattr("protrain.cli.metrics.time", SimpleNamespace(monotonic=lambda: next(clock_s)))
    status = "loss 2.500  held out 2.750  lr 0.0003  norm 1.2  123k tok/s"
    with ProgressLine("", 20000, done=1000) as line:
        line.update(1100, status, plain=True)  # 100 steps in 50 s
        line.update(1101, "not shown", plain=False)
        line.update(20000, status, plain=True)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "1100/20000 loss 2.500 held out 2.750 lr 0.0003 norm 1.2 123k tok/s 2:37:30 left"
    assert last == f"20000/20000  {status}"
    assert max(len(first), len(last)) <= 80


def test_a_terminal_sees_one_line_of_progress_below_the_notes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressLine("", 10) as line:
        line.update(1, "loss 5.000", plain=True)
        line.note("saved it")
        line.update(10, "loss 4.000", plain=True)
    written = capsys.readouterr().err.split("\n")
    assert [text.rpartition("\r\033[K")[2] for text in written] == ["saved it", "10/10  loss 4.000", ""]
    assert "1/10  loss 5.000" in written[1], "shown again below the note"


def test_the_status_line_and_the_curve(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, resumed_step=0)
    figures = {"loss": 2.5, "learning_rate": 0.00030001, "gradient_norm": 1.2345, "tokens_per_s": 123456.5}
    metrics.add({"step": 1, **figures, "gradient_norm": None, "tokens_per_s": None})
    assert metrics.status() == "loss 2.500  lr 0.0003"
    metrics.add({"step": 1, "evaluation_loss": 2.75})
    metrics.add({"step": 2, **figures})
    assert metrics.status() == "loss 2.500  held out 2.750  lr 0.0003  norm 1.2  123k tok/s"
    for step, speed in enumerate((200.0, 100.0, 9000.0, 100.0), 3):
        metrics.add({"step": step, **figures, "tokens_per_s": speed})
    assert metrics.status().endswith("norm 1.2  200 tok/s"), (
        "the median of the last steps, and not one step that was odd"
    )
    for step in range(7, 17):
        metrics.add({"step": step, **figures, "tokens_per_s": 50.0})
    assert metrics.status().endswith("norm 1.2  50 tok/s"), "no old steps"
    rows = [{"step": step, "loss": 5 / step} for step in range(1, 9)] + [{"step": 8, "evaluation_loss": 1.0}]
    path = draw_loss_curve(tmp_path, rows, unigram_entropy=3.2)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
