"""Signals: how the program `protrain` ends on Ctrl-C, and how a training that is asked to stop does so in good order.

By default Python raises a KeyboardInterrupt in whatever code is running. That is not enough for a program that imports
torch and profiles models. During imports it prints a page of traceback. In a finalizer, or in the callback of a weak
reference, Python prints the exception and goes on as if nothing had happened. C code that looks up an attribute takes
the exception for a missing attribute, and a profile or a measurement would then silently be wrong.

So importing this module gives the program a handler that writes a line and leaves the process, which nothing can
swallow. A training of the Trainer has handlers of its own once it has something to save: ``stop_requests`` notes
signals, which end it between two steps. A process that merely imports the library keeps its own handlers.

This module must be imported before torch, whose import takes seconds, so it imports only small modules.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from protrain.common.progress import silence

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# signals that are no further apart count as one, because a wrapper passes on what its group got already
_ONE_REQUEST_S = 1.0


class StopRequests:
    """The signals that came. A second request stops the run at once.

    Args:
        answer: a line for standard error when the first one comes.
    """

    def __init__(self, answer: str = "") -> None:
        self.received = 0  # the first signal, or 0 if none came
        self.of_all = 0  # one that had come to any rank by the end of the last backward
        self._answer = answer
        self._last_s = 0.0  # when the newest signal that counts came

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal. This is the signal handler."""
        now_s = time.monotonic()
        first = not self.received
        if not first and now_s - self._last_s < _ONE_REQUEST_S:
            return
        self._last_s = now_s
        self.received = self.received or number
        if number == signal.SIGHUP:
            _silence_closed_terminal()
        if first and self._answer:
            with suppress(OSError):  # the descriptor, as the stream may be in the middle of writing a line
                os.write(2, f"\nprotrain: {signal.Signals(number).name}: {self._answer}\n".encode())
        # Only SIGHUP never counts as a second request. A terminal closes once, and both the kernel and its shell report
        # it.
        if not first and number != signal.SIGHUP:
            raise KeyboardInterrupt


@contextmanager
def stop_requests(answer: str = "") -> Iterator[StopRequests]:
    """Note Ctrl-C, SIGTERM and a closed terminal.

    A signal that was ignored stays so, as nohup and scripts rely on it. So does one that has another handler than
    Python's own and that of the program `protrain`. ``answer`` is that of ``StopRequests``.
    """
    requests = StopRequests(answer)
    main = threading.current_thread() is threading.main_thread()  # no other thread may have handlers
    replaced = (signal.SIG_DFL, signal.default_int_handler, end_at_once)
    handled = [number for number in SIGNALS if main and signal.getsignal(number) in replaced]
    before = {number: signal.signal(number, requests.receive) for number in handled}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence_closed_terminal() -> None:
    """Drop what is yet to be printed to a terminal that is closed: an error of that would come before the save."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            os.write(stream.fileno(), b"")
        except (OSError, ValueError):  # also of a stream without a descriptor, which stays
            silence(stream)


def is_program() -> bool:
    """Whether Python was started as `protrain ...` or as `python -m protrain ...`."""
    before_arguments = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
    return bool(before_arguments) and os.path.basename(before_arguments[-1]) == "protrain"


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """The signal handler: write `protrain COMMAND: interrupted` to standard error and leave with 128 + ``number``.

    It writes to the file descriptor, because the stream may be in the middle of writing a line.
    """
    words = ["protrain", *(word for word in sys.argv[1:2] if not word.startswith("-"))]
    try:
        os.write(2, f"{' '.join(words)}: interrupted\n".encode(errors="replace"))
    except OSError:  # nobody reads standard error
        pass
    finally:
        os._exit(128 + number)


# A script may start background programs with Ctrl-C ignored. Then it stays ignored.
if (
    is_program()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, end_at_once)
