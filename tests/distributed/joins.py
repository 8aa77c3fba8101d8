"""What ranks do in ``test_joins.py``: they find each other, and one of them dies, fails or takes its time there."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import protrain
from protrain.distributed import watch
from tests.distributed import out_of_step
from tests.distributed.async_saves import held
from tests.distributed.saves import Training

GROUPS = ("the start of the process group", "control", "gathers", "reductions")  # in the order in which they start


def die() -> None:
    """End without a word."""
    print(f"dies at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_and_die() -> None:
    """End when others wait."""
    time.sleep(1)
    die()


def fail() -> None:
    """Raise an error."""
    print(f"fails at {time.time()}", flush=True)
    raise ArithmeticError("a rank fails")


def be_busy() -> None:
    """Be busy for three seconds in which no other thread of this process runs, as a compiler may be."""
    ctypes.PyDLL(None).sleep(3)


def before(place: str, act: Callable[[], None]) -> None:
    """Let this process ``act`` before it takes part in what starts at ``place``."""
    start, left = dist.distributed_c10d._new_process_group_helper, GROUPS.index(place)

    def act_and_start(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            dist.distributed_c10d._new_process_group_helper = start
            act()
        return start(*args, **options)

    dist.distributed_c10d._new_process_group_helper = act_and_start


def join(rank: int, size: int, odd: int, place: str, act: Callable[[], None], times: dict[str, float]) -> None:
    """Begin a training. Rank ``odd`` does ``act`` at ``place``. ``times`` changes those of the watcher, in seconds."""
    for name, seconds in times.items():
        assert hasattr(watch, name)
        setattr(watch, name, seconds)
    if rank == odd:
        before(place, act)
    out_of_step.do(rank, size, -1, "", {}, 1)


def join_without_the_last(rank: int, size: int) -> None:
    """Begin a training, to which the last rank never comes. The one before it dies while it waits for that one."""
    if rank == size - 1:
        time.sleep(60)
    if rank == size - 2:
        before(GROUPS[0], wait_and_die)
    out_of_step.wrapped(rank, "cpu")


def save_end_the_group_and_die(rank: int, size: int, odd: int, folder: str) -> None:
    """Save in the background and end the process group. Then rank ``odd`` dies before it has written its part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(rank, size, None)
    training.train(range(1))
    with held(by=rank == odd):
        path = protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler)
        dist.barrier()
        dist.destroy_process_group()
        Path(folder, f"rank{rank}").touch()
        if rank == odd:
            wait_and_die()
        path.result()
