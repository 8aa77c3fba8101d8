"""Saves and loads take little host memory beside the states, however large a parameter is."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import protrain
from tests.distributed.apart import Group

ROWS, WIDTH = 24_000, 1000
STATE_BYTES = 12 * ROWS * WIDTH  # of the embedding alone: its master and two moments in fp32
MOST_BYTES = {"save": 64 * 2**20, "load": 48 * 2**20}  # that all processes of a node may take together


class Large(nn.Module):
    """A model that is little more than one large parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 10)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers[0](self.embedding(x)).float().square().mean()
        return loss


def own_bytes() -> int:
    """The memory of this process, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def taken_bytes(work: Callable[[], object]) -> int:
    """The most memory that the process has taken for ``work``."""
    gc.collect()
    before, found, ended = own_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.is_set():
            found.append(own_bytes() - before)
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max(found)


def save_and_load(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = torch.tensor([[1, 2]])
    model: nn.Module = Large()
    model, optimizer = protrain.wrap(
        model,
        torch.optim.AdamW(model.parameters()),
        example_batch={"x": batch},
        dtype=torch.bfloat16,
        device="cpu",
        device_memory="1GiB",
        host_memory="2GiB",
        progress=False,
    )
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    taken = {
        "save": taken_bytes(lambda: protrain.save_checkpoint(folder, model, optimizer)),
        "load": taken_bytes(lambda: protrain.load_checkpoint(folder, model, optimizer)),
    }
    (folder / f"taken {rank}.json").write_text(json.dumps(taken))


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")  # which has the template of such processes
def test_a_large_parameter_takes_little_memory(tmp_path: Path) -> None:
    size, folder = 2, tmp_path / "saves"
    with Group(size, save_and_load, folder, folder=tmp_path) as group:
        endings = group.endings(range(size), timeout_s=180)
    assert [ending.status for ending in endings.values()] == [0] * size, endings
    taken = [json.loads((folder / f"taken {rank}.json").read_text()) for rank in range(size)]
    for what, most_bytes in MOST_BYTES.items():
        assert 4 * most_bytes < STATE_BYTES, "a copy of the state would be found"
        assert sum(of_rank[what] for of_rank in taken) < most_bytes, (what, taken)
