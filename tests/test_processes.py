"""Processes that would not train together are refused in each of them, whatever the order of groups and wrappers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import protrain
from tests import processes
from tests.engine.residual import make

ROOT = Path(__file__).resolve().parent.parent
SAID = {
    "no group": "MASTER_ADDR is missing",
    "group afterwards": "the model was wrapped as one of 1 processes, and now there are 2",
    "ddp in full_parameters": "the model was wrapped as one of 1 processes, and now there are 2",
    "ddp afterwards": "the model was wrapped as one of 1 processes, and now there are 2",
    "sharded afterwards": "the model was wrapped as one of 1 processes, and now there are 2",
    "plain": "nothing",
    "ddp first": "runs inside DistributedDataParallel",
    "ddp itself": "is a DistributedDataParallel",
    "sharded first": "is a DTensor",
}


def test_every_order_in_both_processes(tmp_path: Path) -> None:
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.processes", str(tmp_path)]
    started = [
        subprocess.Popen(command, cwd=ROOT, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for text in said:
        lines = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        assert SAID.keys() == {*processes.WITHOUT_GROUP, *processes.WITH_GROUP}
        for name, words in SAID.items():
            assert words in lines[name], (name, lines[name])


def test_one_process_that_torchrun_started_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    protrain.wrap(model, optimizer, example_batch=(torch.ones(2, 8),), device="cpu", progress=False)
