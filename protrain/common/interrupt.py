"""Ends the program `protrain` at once and with one line on Ctrl-C, from its first import to the exit of Python.

By default Python raises a KeyboardInterrupt in whatever code is running. That is not enough for a program that imports
torch and profiles models. During imports it prints a page of traceback. In a finalizer, or in the callback of a weak
reference, Python prints the exception and goes on as if nothing had happened. C code that looks up an attribute takes
the exception for a missing attribute, and a profile or a measurement would then silently be wrong.

So importing this module gives the program a handler that writes a line and leaves the process, which nothing can
swallow. Commands that have to clean up (`train`, `bench`) have handlers of their own while they run; see
``protrain.common.signals``. A process that merely imports the library keeps its own handlers.

This module must be imported before torch, whose import takes seconds, so it imports only small modules of Python's own.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_CLEARED_LINE = "\r\033[K"  # clears the line of a running stage in a terminal, which has no line end yet


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
        start = _CLEARED_LINE if os.isatty(2) else ""
        os.write(2, f"{start}{' '.join(words)}: interrupted\n".encode(errors="replace"))
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
