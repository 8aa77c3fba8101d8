"""Processes that would not train together are refused in each of them, whatever the order of groups and wrappers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import protrain
from tests.distributed.apart import Group
from tests.distributed.pool import error_of
from tests.distributed.training import step
from tests.engine import residual
from tests.engine.harness import adamw


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def with_ddp(model: nn.Module) -> nn.Module:
    vars(model)["around"] = DistributedDataParallel(model)
    return model


def its_ddp(model: nn.Module) -> nn.Module:
    around: nn.Module = vars(model)["around"]
    return around


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return model


def as_it_is(model: nn.Module) -> nn.Module:
    return model


Change = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Order:
    """What the script does before and after wrap, when there is a group, and the error of both ranks."""

    said: str
    before: Change = as_it_is
    after: Change = as_it_is
    group: str = "first"  # or "after wrap", or "never"


ALONE = "the model was wrapped as one of 1 processes, and now there are 2"
ORDERS = {
    "as it should be": Order(""),
    "no group": Order("MASTER_ADDR is missing", group="never"),
    "group afterwards": Order(ALONE, group="after wrap"),
    "ddp afterwards": Order(ALONE, after=in_ddp, group="after wrap"),
    "sharded afterwards": Order(ALONE, after=sharded, group="after wrap"),
    "ddp first": Order("runs inside DistributedDataParallel", before=with_ddp, after=its_ddp),
    "ddp around it": Order("DistributedDataParallel reads it too: do without that", after=in_ddp),
    "ddp itself": Order("is a DistributedDataParallel", before=in_ddp),
    "sharded first": Order("is a DTensor", before=sharded),
}


def run(order: Order, rank: int, folder: Path) -> None:
    """Each group has a store of its own, as a shared one would have the addresses of the group before it."""

    def start() -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=2)

    if order.group == "first":
        start()
    model = order.before(residual.make())
    with pytest.MonkeyPatch.context() as patch:
        if order.group == "after wrap":
            patch.delenv("WORLD_SIZE")
        batch = residual.batches(1)[0]
        how: dict[str, Any] = {"example_batch": batch, "device": "cpu", "progress": False}
        model, optimizer = protrain.wrap(model, adamw(model), **how)
    if order.group == "after wrap":
        start()
    model = order.after(model)
    for _ in range(2):
        step(model, optimizer, batch)


def run_all(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    for number, (name, order) in enumerate(ORDERS.items()):
        error = error_of(run, order, rank, folder / f"store {number}")
        if dist.is_initialized():
            dist.barrier()  # neither leaves while the other one connects
            dist.destroy_process_group()
        print(f"{name}: {' '.join(error.split())}", flush=True)


@pytest.mark.slow
def test_every_order_in_both_processes(tmp_path: Path) -> None:
    with Group(2, run_all, tmp_path, folder=tmp_path) as group:
        endings = group.endings(range(2))
    for ending in endings.values():
        assert ending.status == 0, ending.text
        lines = dict(line.split(": ", 1) for line in ending.text.splitlines() if ": " in line)
        for name, order in ORDERS.items():
            assert order.said in lines[name], (name, lines[name])
            assert bool(order.said) == bool(lines[name]), name


def test_one_process_that_torchrun_started_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = residual.make()
    protrain.wrap(model, adamw(model), example_batch=residual.batches(1)[0], device="cpu", progress=False)
