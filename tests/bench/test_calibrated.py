"""Benchmarks calibrate as many GPUs as they train on, and only once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import calibrated
from bench.calibrated import calibrate_once, is_calibrated
from protrain.hardware.cache import Machine


@pytest.mark.parametrize("before", [True, False])
def test_as_many_gpus_are_calibrated_as_train_together(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    asked: list[tuple[str, int]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode=0)

    def answer(device: str, processes: int) -> bool:
        asked.append((device, processes))
        return before

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(calibrated, "is_calibrated", answer)
    calibrate_once(4)
    assert asked == [("cuda", 4)]
    assert [command[1:] for command in commands] == ([] if before else [["-m", "protrain", "calibrate", "--gpus", "4"]])


def test_ranks_that_may_not_use_nvlink_have_a_calibration_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        path = Machine.of(torch.device("cpu")).path  # of the file that two ranks would leave
    path.parent.mkdir()
    path.touch()
    assert is_calibrated("cpu", 2)
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    assert not is_calibrated("cpu", 2)
