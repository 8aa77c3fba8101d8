"""Processes that would not train together are refused in each of them, whatever the order of groups and wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import protrain
from tests import processes
from tests.distributed.apart import Group
from tests.engine.residual import make

pytestmark = pytest.mark.xdist_group("ranks")  # which shares the processes of the other tests of several ranks
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


@pytest.mark.slow
def test_every_order_in_both_processes(tmp_path: Path) -> None:
    with Group(2, processes.run_all, tmp_path, folder=tmp_path) as group:
        endings = group.endings(range(2))
    for ending in endings.values():
        assert ending.status == 0, ending.text
        lines = dict(line.split(": ", 1) for line in ending.text.splitlines() if ": " in line)
        assert SAID.keys() == {*processes.WITHOUT_GROUP, *processes.WITH_GROUP}
        for name, words in SAID.items():
            assert words in lines[name], (name, lines[name])


def test_one_process_that_torchrun_started_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    protrain.wrap(model, optimizer, example_batch=(torch.ones(2, 8),), device="cpu", progress=False)
