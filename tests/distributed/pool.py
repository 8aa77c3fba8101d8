"""Processes that train together, for tests: started once, they run one function after another as the ranks of a group.

To start a process and import torch takes seconds, so all tests of as many ranks share the same processes. After an
error or a timeout they are killed, and the next test starts new ones.
"""

from __future__ import annotations

import atexit
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

_pools: dict[int, Pool] = {}


class RankError(Exception):
    """A function raised an error on some ranks. ``by_rank`` has the error of each, as text; None if it raised none."""

    def __init__(self, by_rank: list[str | None]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text is not None))
        self.by_rank = by_rank


class Pool:
    """``size`` processes with a group of gloo, and of NCCL if each of them has a GPU."""

    def __init__(self, size: int) -> None:
        context = get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pairs = [context.Pipe() for _ in range(size)]
        self.pipes: list[Connection] = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """``function(rank, *args)`` on every rank. Returns what each returned. RankError if any raised."""
        for pipe in self.pipes:
            pipe.send((function, args))
        found: list[tuple[bool, Any] | None] = [None] * len(self.pipes)
        end = monotonic() + timeout_s
        while any(answer is None for answer in found):
            ready = wait(
                [pipe for pipe, answer in zip(self.pipes, found, strict=True) if answer is None], end - monotonic()
            )
            if not ready:
                break
            for rank, pipe in enumerate(self.pipes):
                if pipe in ready:
                    try:
                        found[rank] = pipe.recv()
                    except EOFError:
                        found[rank] = (False, "the process died")
        answers = [(False, "no answer: it hangs") if answer is None else answer for answer in found]
        if not all(well for well, _ in answers):
            self.kill()
            raise RankError([None if well else value for well, value in answers])
        return [value for _, value in answers]

    def kill(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(rank, *args)`` on each of ``size`` ranks. ``function`` must be importable."""
    pool = _pools.get(size)
    if pool is None or not all(process.is_alive() for process in pool.processes):
        pool = _pools[size] = Pool(size)
        atexit.register(pool.kill)
    return pool.run(function, *args, timeout_s=timeout_s)


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(rank, *args))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        pipe.send(answer)
