"""What ranks do in ``test_out_of_step.py``: a small training, in which one rank does something else than the others."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import protrain
from protrain.distributed import watch
from protrain.optim.optimizer import ProTrainOptimizer

WIDTH, BLOCKS, ROWS = 16, 3, 4


class _Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("the backward of a rank fails")


class Block(nn.Module):
    """A layer that fails when it is told to."""

    fail = ""  # "forward" or "backward"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        if Block.fail == "forward":
            raise ValueError("the forward of a rank fails")
        if Block.fail == "backward":
            value = _Fails.apply(value)
        return value + torch.relu(self.linear(value))


class Model(nn.Module):
    """Blocks with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value.square().mean()


def batch(rank: int, step: int, rows: int = ROWS) -> Tensor:
    """The input of ``rank`` at ``step``."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def wrapped(rank: int, device: str) -> tuple[nn.Module, ProTrainOptimizer]:
    """The model on ``device``: "cpu", or "cuda" where each rank has a GPU."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if device == "cuda":
        torch.cuda.set_device(rank)
    memory = "64MiB" if device == "cpu" else None
    return protrain.wrap(
        model, optimizer, example_batch=(batch(rank, 0),), device=device, device_memory=memory, dtype=torch.float32
    )


def step(model: nn.Module, optimizer: ProTrainOptimizer, value: Tensor) -> float:
    """One step of training. Returns the loss."""
    loss: Tensor = model(value)
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


QUICK = {"TICK_S": 0.3, "CAUGHT_S": 1.0, "STUCK_S": 0.8}  # for tests of what is said rather than when


@contextmanager
def quick(**times: float) -> Iterator[None]:
    """Times of the watcher that suit tests of what is said rather than when, but for ``times``, in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {**QUICK, **times}.items():
            patch.setattr(watch, name, seconds)
        yield


def set_times(times: dict[str, float]) -> None:
    """Change times of the watcher, in seconds, for the rest of this process."""
    for name, seconds in times.items():
        assert hasattr(watch, name)
        setattr(watch, name, seconds)


def do(rank: int, size: int, odd: int, what: str, times: dict[str, float], steps: int, device: str = "cpu") -> None:
    """Train. Before the third step rank ``odd`` does ``what``. ``times`` changes those of the watcher, in seconds."""
    set_times(times)
    Block.fail = ""
    model, optimizer = wrapped(rank, device)
    for at in range(steps):
        print(f"step {at}", flush=True)
        value = batch(rank, at)
        if at == 2 and rank == odd:
            value = _misbehave(what, model, optimizer, value)
        step(model, optimizer, value)
    print("trained", flush=True)


def attempt(rank: int, size: int, odd: int, what: str) -> str:
    """The error of ``do`` on this rank."""
    with quick(**({"CAUGHT_S": 60.0} if what == "caught" else {})):  # which a loaded machine may take to go on
        try:
            do(rank, size, odd, what, {}, 4)
        except (protrain.MisuseError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        else:
            said = ""
    if what in COLLECTIVES and rank != odd:
        COLLECTIVES[what]()  # in which the odd rank still waits
    return said


COLLECTIVES = {"barrier": dist.barrier, "all_reduce": lambda: dist.all_reduce(torch.ones(1))}


def end(rank: int, size: int, own: bool) -> None:
    """Train and end. If ``own`` is true, the group is that of this script and not the one that wrap starts."""
    if own:
        dist.init_process_group("gloo")
    # Python calls atexit's functions in reverse order, so this one looks after wrap's own has ended the group.
    atexit.register(lambda: print(f"there is a group: {dist.is_initialized()}", flush=True))
    do(rank, size, -1, "", {}, 1)


def run(rank: int, size: int, timeout_s: float, device: str = "cpu") -> None:
    """Train until something happens. ``timeout_s`` is that of the process group."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    do(rank, size, -1, "", {}, 1_000_000, device)


def run_with_child(rank: int, size: int) -> None:
    """Train until something happens. Each rank has a forked child, as a DataLoader has, which outlives it."""
    model, optimizer = wrapped(rank, "cpu")
    step(model, optimizer, batch(rank, 0))
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    print(f"child {child}", flush=True)
    while True:
        step(model, optimizer, batch(rank, 0))


def end_group_after_an_error(rank: int, size: int, times: dict[str, float]) -> None:
    """Train. Rank 1 fails between steps, in a script that ends its process group whatever happens."""
    set_times(times)
    model, optimizer = wrapped(rank, "cpu")
    step(model, optimizer, batch(rank, 0))
    try:
        if rank == 1:
            raise ValueError("the loader of a rank fails")
        step(model, optimizer, batch(rank, 1))
    finally:
        dist.destroy_process_group()
        time.sleep(1.0)  # as for a logger that says goodbye


def _misbehave(what: str, model: nn.Module, optimizer: ProTrainOptimizer, value: Tensor) -> Tensor:
    """Do ``what`` before a step. Returns what the step is to train on, in place of ``value``."""
    if what in ("forward", "backward"):
        Block.fail = what
    elif what == "loader":
        raise ValueError("the loader of a rank fails")
    elif what in COLLECTIVES:
        COLLECTIVES[what]()
    elif what == "another forward":
        model(value)
    elif what == "evaluation":
        with torch.no_grad():
            model(value)
    elif what == "hyperparameters":
        optimizer.param_groups[0].update(lr=0.05, betas=(0.8, 0.999))
    elif what == "state_dict":
        model.state_dict()
    elif what == "optimizer state_dict":
        optimizer.state_dict()
    elif what == "full_parameters":
        with protrain.full_parameters(model):
            pass
    elif what.endswith("end"):
        time.sleep(2 if what == "late end" else 0)
        raise SystemExit
    elif what == "slow":
        time.sleep(3)
    elif what == "caught":
        try:
            model(value.repeat(100_000, 1))  # too much for the memory of the device
        except protrain.MisuseError:
            time.sleep(0.5)
    else:
        assert what == "shape"
        return value[:1]
    return value
