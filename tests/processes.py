"""What one of two processes does: every order of process groups, wrappers and protrain.wrap, each with what it said."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import protrain

X = torch.ones(8, 16)
_groups = itertools.count()


def start_group() -> None:
    """Each group has a store of its own, as a shared one would have the addresses of the group before it."""
    path = f"file://{os.environ['STORES']}/{next(_groups)}"
    dist.init_process_group("gloo", init_method=path, rank=int(os.environ["RANK"]), world_size=2)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))


def wrap(model: nn.Module) -> tuple[nn.Module, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return protrain.wrap(model, optimizer, example_batch=(X,), device="cpu", progress=False)


def train(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        model(X).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def plain() -> None:
    train(*wrap(make()))


def ddp_first() -> None:
    model = make()
    around = DistributedDataParallel(model)
    _, optimizer = wrap(model)
    train(around, optimizer)


def ddp_itself() -> None:
    train(*wrap(DistributedDataParallel(make())))


def sharded_first() -> None:
    model = make()
    fully_shard(model)
    train(*wrap(model))


def wrapped_alone(then: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """Wrapped before there is a process group, then put under something that spreads it."""

    def run() -> None:
        count = os.environ.pop("WORLD_SIZE")
        try:
            model, optimizer = wrap(make())
        finally:
            os.environ["WORLD_SIZE"] = count
        start_group()
        train(then(model), optimizer)

    return run


def in_full_parameters(model: nn.Module) -> nn.Module:
    with protrain.full_parameters(model):
        return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model)
    return model


WITH_GROUP = {"plain": plain, "ddp first": ddp_first, "ddp itself": ddp_itself, "sharded first": sharded_first}
WITHOUT_GROUP = {
    "no group": plain,
    "group afterwards": wrapped_alone(lambda model: model),
    "ddp in full_parameters": wrapped_alone(in_full_parameters),
    "ddp afterwards": wrapped_alone(DistributedDataParallel),
    "sharded afterwards": wrapped_alone(sharded),
}


def run_all(rank: int, size: int, folder: Path) -> None:
    """Print one line for each order, ``ORDER: ERROR``. Stores of groups are made in ``folder``."""
    os.environ["STORES"] = str(folder)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    torch.set_num_threads(1)
    for name, run in {**WITHOUT_GROUP, **WITH_GROUP}.items():
        if name in WITH_GROUP:
            start_group()
        try:
            run()
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if dist.is_initialized():
            dist.barrier()  # neither leaves while the other one connects
            dist.destroy_process_group()
        print(f"{name}: {' '.join(said.split())}", flush=True)
