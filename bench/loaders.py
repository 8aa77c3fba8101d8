"""Processes that load a part of the machine for a share of the time, and others that measure what the load leaves.

A load is so many loaders, which may be a fraction: of 2.4 loaders two run all the time, and a third for 40% of it.
Loaders and probes are processes of their own, so that they take no time from the Python of what runs beside them. They
end with the process that started them, however it ends.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Semaphore
from typing import Any, Generic, TypeVar

Measured = TypeVar("Measured")

_HALVINGS = 6  # of the range in which the number of loaders lies
_READY_S = 120
_SETTLED_S = 0.2  # after which all loaders do what they were told last
_LOOK_S = 0.01  # a loader that rests looks this often whether it is told otherwise


class LoadError(RuntimeError):
    """No load leaves what is wanted, or a process that makes or measures it has failed."""


def enough_loaders(rate: Callable[[float], float], wanted: float, *, most: int) -> float:
    """The number of loaders, up to ``most``, beside which ``rate``, which falls with it, is about ``wanted``."""
    low, high = 0.0, float(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > wanted else (low, middle)
    return (low + high) / 2


def rest_s(busy_s: float, share: float) -> float:
    """How long a loader rests after ``busy_s`` of work, so that it works for ``share`` of the time."""
    return busy_s * (1 / share - 1)


class Loaders:
    """Processes, of which some do their work again and again while ``running`` is active.

    Args:
        prepare: what a process calls once. It returns the work, a call of which takes milliseconds.
        most: how many loaders there are.
        each: the arguments of ``prepare``, for every process that makes up one loader.

    Raises:
        LoadError: a process was not ready in time, or ended.
    """

    def __init__(
        self, prepare: Callable[..., Callable[[], object]], most: int, *, each: Sequence[tuple[Any, ...]] = ((),)
    ) -> None:
        context = multiprocessing.get_context("spawn")
        ready = context.Semaphore(0)
        self._shares = [context.Value("d", 0.0) for _ in range(most)]
        self._processes: list[list[BaseProcess]] = [
            [
                context.Process(target=_load, args=(prepare, arguments, share, ready, os.getpid()), daemon=True)
                for arguments in each
            ]
            for share in self._shares
        ]
        try:
            for process in self._all():
                process.start()
            until = time.monotonic() + _READY_S
            for _ in self._all():  # what they import and fill takes the machine's time as well
                while not ready.acquire(timeout=0.2):
                    self._refuse_ended()
                    if time.monotonic() > until:
                        raise LoadError(f"the processes that make a load were not ready within {_READY_S} s")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def running(self, loaders: float) -> Iterator[None]:
        """So many loaders, for as long as the context lasts. LoadError at its end if one has ended before."""
        self._set(loaders)
        try:
            yield
            self._refuse_ended()
        finally:
            self._set(0.0)

    def close(self, *, beyond: float = 0.0) -> None:
        """End the processes, except those that a load of ``beyond`` loaders needs."""
        kept = [index for index in range(len(self._processes)) if index < beyond]
        ended = self._processes[len(kept) :]
        self._processes, self._shares = self._processes[: len(kept)], self._shares[: len(kept)]
        _end(itertools.chain.from_iterable(ended))

    def _all(self) -> list[BaseProcess]:
        return list(itertools.chain.from_iterable(self._processes))

    def _refuse_ended(self) -> None:
        for process in self._all():
            if process.exitcode is not None:
                raise LoadError(f"a process that makes a load ended with exit status {process.exitcode}")

    def _set(self, loaders: float) -> None:
        for index, share in enumerate(self._shares):
            share.value = min(1.0, max(0.0, loaders - index))
        time.sleep(_SETTLED_S)


class Probes(Generic[Measured]):
    """Processes that measure when they are asked, all at the same time.

    Args:
        prepare: what a process calls once. It returns the measurement.
        each: the arguments of ``prepare``, for every process.

    Raises:
        LoadError: a process was not ready in time, or ended.
    """

    def __init__(self, prepare: Callable[..., Callable[[], Measured]], each: Sequence[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        try:
            for arguments in each:
                own, others = context.Pipe()
                self._connections.append(own)
                process = context.Process(target=_probe, args=(prepare, arguments, others), daemon=True)
                self._processes.append(process)
                process.start()
                others.close()  # so that the end of either process ends the connection
            self._answers()  # that they are ready
        except BaseException:
            self.close()
            raise

    def measure(self) -> list[Measured]:
        """What every process measures now."""
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # there will be no answer either
                connection.send(None)
        return self._answers()

    def close(self) -> None:
        """End the processes."""
        _end(self._processes)

    def _answers(self) -> list[Measured]:
        found = []
        for connection in self._connections:
            try:
                if not connection.poll(_READY_S):
                    raise LoadError(f"a process that measures what a load leaves did not answer within {_READY_S} s")
                found.append(connection.recv())
            except (EOFError, ConnectionError):
                raise LoadError("a process that measures what a load leaves ended, as it says above") from None
        return found


def _end(processes: Iterable[BaseProcess]) -> None:
    """Kill ``processes``, and wait until what they held is free."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()


def _load(
    prepare: Callable[..., Callable[[], object]],
    arguments: tuple[Any, ...],
    share: Synchronized[Any],
    ready: Semaphore,
    parent: int,
) -> None:
    """Work for ``share`` of the time, as long as the process ``parent`` lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    work = prepare(*arguments)
    ready.release()
    while os.getppid() == parent:
        wanted = share.value
        if wanted == 0:
            time.sleep(_LOOK_S)
            continue
        begin = time.perf_counter()
        work()
        end = time.perf_counter()
        until = end + rest_s(end - begin, wanted)
        while share.value == wanted and (left_s := until - time.perf_counter()) > 0:
            time.sleep(min(_LOOK_S, left_s))


def _probe(prepare: Callable[..., Callable[[], object]], arguments: tuple[Any, ...], connection: Connection) -> None:
    """Measure whenever the other side asks, as long as it lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    measure = prepare(*arguments)
    connection.send(None)
    with contextlib.suppress(EOFError):
        while True:
            connection.recv()
            connection.send(measure())
