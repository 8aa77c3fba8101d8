"""Benchmarks calibrate as many GPUs as they train on, and only once."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from bench.calibrated import calibrate_once


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_as_many_gpus_are_calibrated_as_train_together(is_calibrated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        asks = len(commands) == 1
        return subprocess.CompletedProcess(command, returncode=int(asks and not is_calibrated))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("subprocess.run", run)
    calibrate_once(4)
    question, *calibrations = commands
    assert question[-1] == "4"
    assert [command[1:] for command in calibrations] == (
        [] if is_calibrated else [["-m", "protrain", "calibrate", "--gpus", "4"]]
    )
