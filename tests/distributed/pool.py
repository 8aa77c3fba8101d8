"""Processes that train together, for tests: started once, they run one function after another as the ranks of a group.

All tests of as many ranks share the same processes, so that what takes time in a process only once, such as the profile
of a model, is done once. After an error or a timeout they are killed, and the next test starts new ones.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.apart import LIMIT_S, environments
from tests.distributed.warm import Process, import_early
from tests.engine.profiles import share_profiles

_pools: dict[int, Pool] = {}


class RankError(Exception):
    """A function raised an error on some ranks. ``by_rank`` has the error of each, as text; None if it raised none."""

    def __init__(self, by_rank: list[str | None]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text is not None))
        self.by_rank = by_rank


def _answer(pipe: Any, end: float) -> tuple[bool, Any] | None:
    """Whether a function has returned, and its value or its error. None: it has not until ``end``."""
    try:
        answer: tuple[bool, Any] | None = pickle.loads(pipe.recv_bytes()) if pipe.poll(end - monotonic()) else None
    except EOFError:
        answer = False, "the process died"
    return answer


class Pool:
    """``size`` processes with a group of gloo, and of NCCL if each of them has a GPU."""

    def __init__(self, size: int) -> None:
        self._folder = TemporaryDirectory()
        self._killed = False
        with Listener(f"{self._folder.name}/socket", backlog=size) as listener:
            self._processes = [
                Process(_serve, listener.address, rank, environment=environment)
                for rank, environment in enumerate(environments(size))
            ]
            accepted = [listener.accept() for _ in range(size)]
        self._pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in accepted)]
        atexit.register(self.kill)

    @property
    def is_alive(self) -> bool:
        """Whether all processes run, and none was told to end: a killed one takes a moment to be gone."""
        return not self._killed and all(process.status is None for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(rank, *args)`` on every rank. Returns what each returned. RankError if any raised or hangs."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        end = monotonic() + LIMIT_S
        found = [_answer(pipe, end) for pipe in self._pipes]
        for process, answer in zip(self._processes, found, strict=True):
            if answer is None:
                process.send(signal.SIGUSR1)  # it writes to stderr where its threads are
                sleep(1.0)
        answers = [(False, "no answer: it hangs") if answer is None else answer for answer in found]
        if not all(well for well, _ in answers):
            self.kill()
            raise RankError([None if well else value for well, value in answers])
        return [value for _, value in answers]

    def kill(self) -> None:
        """End the processes."""
        self._killed = True
        for process in self._processes:
            process.send(signal.SIGKILL)


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, *args)`` on each of ``size`` ranks. ``function`` must be importable."""
    pool = _pools.get(size)
    if pool is None or not pool.is_alive:
        pool = _pools[size] = Pool(size)
    return pool.run(function, *args)


def error_of(does: Callable[..., object], *args: Any) -> str:
    """The error that ``does(*args)`` raises, with its type, or nothing."""
    try:
        does(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _error_on(rank: int, function: Callable[..., object], *args: Any) -> str:
    return error_of(function, rank, *args)


def errors_on(size: int, function: Callable[..., object], *args: Any) -> list[str]:
    """The error that ``function(rank, *args)`` raises on each of ``size`` ranks, with its type, or nothing."""
    return on_ranks(size, _error_on, function, *args)


def import_in_pools(*names: str) -> None:
    """Import modules once for the ranks of all tests that follow, where each rank would import them for itself."""
    if import_early(frozenset(names)):
        while _pools:
            _pools.popitem()[1].kill()


def _serve(address: str, rank: int) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    share_profiles(pytest.MonkeyPatch())
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= size else "gloo")
    with Client(address) as pipe:
        pipe.send(rank)
        while True:
            try:
                function, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            try:
                answer = (True, function(rank, *args))
            except BaseException as error:
                answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
            pipe.send_bytes(pickle.dumps(answer))
