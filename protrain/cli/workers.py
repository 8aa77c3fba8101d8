"""Calls a function for many items in several processes, with the results in the order of the items."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_ITEMS = 256  # that are sent at once, as every exchange takes time
_AHEAD = 2  # pieces for each process that are under way, so that memory stays bounded

_function: Callable[[Any], Any] | None = None  # of a process that works


def in_order(function: Callable[[Item], Result], items: Iterable[Item], processes: int) -> Iterator[Result]:
    """``function`` of every item. With several ``processes``, function, items and results must be such as pickle takes.

    The processes are new ones and no forks, as the caller may have threads that communicate. An error of ``function``
    is raised when its turn comes.
    """
    if processes == 1:
        yield from map(function, items)
        return
    items, under_way = iter(items), deque[Future[list[Result]]]()
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin, initargs=(function,)) as pool:
        try:
            while piece := list(islice(items, _ITEMS)):
                under_way.append(pool.submit(_results, piece))
                if len(under_way) > _AHEAD * processes:
                    yield from under_way.popleft().result()
            while under_way:
                yield from under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the caller, which ends its processes
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    caller = parent_process()
    assert caller is not None, "this process was started by one"
    caller.join()
    os._exit(1)


def _results(piece: list[Any]) -> list[Any]:
    assert _function is not None, "a process begins with it"
    return [_function(item) for item in piece]
