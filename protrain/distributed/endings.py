"""How a process ends whose ranks are out of step: others hear of its error, and nothing keeps it from ending."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

_ABORT_S = 5  # how long a process that got out of step waits for its communicators to be given up, before it ends
_END_S = 10  # how long it may take to end after that


_watches: weakref.WeakSet[Any] = weakref.WeakSet()  # each is a Watch
_aborting: list[threading.Thread] = []  # which give communicators up
_left: list[threading.Thread] = []  # which wait inside torch for ranks that may never come


def see_to_the_end(watch: Any) -> None:
    """Let ``watch`` hear of an exception that ends the process, and bound its end when the ranks are out of step."""
    _watches.add(watch)
    _report_uncaught()


def give_up(abort: Callable[[], None]) -> None:
    """Call ``abort``, which gives communicators up. It is not waited for: NCCL may wait there for other ranks."""
    thread = threading.Thread(target=abort, name="protrain abort", daemon=True)
    thread.start()
    _aborting.append(thread)


def leave_alone(thread: threading.Thread) -> None:
    """Let ``thread`` wait inside torch for other ranks, until the process is gone."""
    _left.append(thread)


def never_free(thing: object) -> None:
    """Keep ``thing``, a collective of gloo that was given up or its process group, until the process is gone.

    A thread of the group works on the collective until all ranks have come, or for the timeout of the group. To free
    either would wait for that thread, at the latest when Python ends.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@atexit.register
def _end_all_the_same() -> None:
    """Bound how long a process that got out of step takes to end.

    CUDA and NCCL free their memory at the very end, after Python, and may wait there without a limit for a collective
    that other ranks never came to. The system's alarm ends the process then, whatever waits.

    A thread that comes back from a wait inside torch while Python ends would abort the process. So if there is one, a
    process that an error ends leaves now.
    """
    if any(watch.is_out_of_step for watch in _watches) and threading.current_thread() is threading.main_thread():
        for thread in list(_aborting):
            thread.join(_ABORT_S)
        if hasattr(sys, "last_value") and any(thread.is_alive() for thread in _left):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_END_S)


@cache
def _report_uncaught() -> None:
    """Let all watches hear of an exception that ends the process."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        for watch in list(_watches):
            watch.raised(error)
        before(kind, error, traceback)

    sys.excepthook = report
