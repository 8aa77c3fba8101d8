"""Two processes of one group, which run one function after another as its ranks."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WITHIN_S = 30.0  # in which every rank has raised its error
_pool: list[Any] = []


def serve(pipe: Any, rank: int, port: int) -> None:
    """What a rank does: one function after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    known = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank}
    os.environ.update({name: str(value) for name, value in {**known, "LOCAL_RANK": rank}.items()})
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    gc.freeze()  # wrap collects garbage, which would go through all that was imported
    while True:
        function, args = pickle.loads(pipe.recv_bytes())
        begin = time.monotonic()
        try:
            answer = function(rank, *args)
        except BaseException as error:
            answer = error
        pipe.send_bytes(pickle.dumps((answer, time.monotonic() - begin)))


def processes() -> Any:
    """Starts processes that need not import anything, as the one that they are forked from has."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.regressions.test_ranks"])
    return context


def start() -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, made = processes(), []
    for rank in range(2):
        mine, its = context.Pipe()
        process = context.Process(target=serve, args=(its, rank, port), daemon=True)
        process.start()
        its.close()
        atexit.register(process.kill)
        made.append((process, mine))
    return made


def end() -> None:
    while _pool:
        _pool.pop()[0].kill()


def on_ranks(function: Callable[..., Any], *args: Any, raises: bool = False, lost: int | None = None) -> list[Any]:
    """``function(rank, *args)`` on both ranks: what each returned, or with ``raises`` the text of its error.

    The rank that is ``lost`` dies. The two processes are those of the test before, if that has not failed.
    """
    if not _pool:
        _pool.extend(start())
    try:
        return results(function, args, raises, lost)
    except BaseException:
        end()
        raise


def results(function: Callable[..., Any], args: Any, raises: bool, lost: int | None) -> list[Any]:
    for _, pipe in _pool:
        pipe.send_bytes(pickle.dumps((function, args)))
    found = []
    for rank, (_, pipe) in enumerate(_pool):
        if rank == lost:
            continue
        assert pipe.poll(100.0), f"rank {rank} hangs"
        answer, seconds = pickle.loads(pipe.recv_bytes())
        if raises:
            assert isinstance(answer, Exception), f"rank {rank} raised nothing"
            assert seconds < WITHIN_S, f"rank {rank} waited for {seconds:.0f} s"
            found.append(f"{type(answer).__name__}: {answer}")
        else:
            assert not isinstance(answer, BaseException), f"rank {rank} raised {answer!r}"
            found.append(answer)
    return found
