"""Where the output of a command goes: to a pipe that nobody reads, to a full disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from protrain.cli.main import main
from protrain.planning import Plan


@pytest.mark.slow
def test_output_that_nobody_reads_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit, match="141"):
            main(["plan", "tiny", "--hardware", "rtx3090", "--batch", "2", "--sequence", "32", "--json"])
        pipe.flush()  # as Python does at its exit
    assert "Broken pipe" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_under_the_output_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "tiny", "--hardware", "rtx3090", "--seq=32", "--json"]) == 1
        full.flush()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "No space left" in line] == [
        "protrain plan: standard output: [Errno 28] No space left on device"
    ]


def test_another_pipe_that_broke_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("protrain.cli.plan_run.run", fail)
    status = main(["plan", "tiny"])
    assert (status, capsys.readouterr().err) == (1, "protrain plan: [Errno 32] Broken pipe\n")


@pytest.mark.slow
def test_a_plan_needs_no_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it where the descriptor is closed
    out = tmp_path / "plan.json"
    argv = ["plan", "tiny", "--hardware", "rtx3090", "--batch", "2", "--sequence", "32", "--out", str(out)]
    assert main(argv) == 0
    assert Plan.load(out).tokens == 64
