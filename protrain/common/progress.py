"""Reports every stage that takes time by one line on standard error."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_LONG_S = 3.0  # a stage that is longer than this also says what it is doing

COUNTED = (
    "the GPU has too little memory to run the model for its profile: memory is counted from shapes, and times are "
    "estimated"
)

_is_heard = True


@contextmanager
def heard(is_heard: bool) -> Iterator[None]:
    """Inside, nothing is written unless ``is_heard``, as for all but the first of processes that do the same."""
    global _is_heard
    before = _is_heard
    _is_heard = before and is_heard
    try:
        yield
    finally:
        _is_heard = before


def say(text: str) -> None:
    """Write ``text`` as a line to standard error.

    Messages there are only for people and must not end a training run. So what cannot be written is dropped: `tee` may
    have ended, or the terminal may be closed.
    """
    stream = sys.stderr
    if not _is_heard or stream is None:  # a process may have no standard error
        return
    try:
        print(text, file=stream, flush=True)
    except BlockingIOError:  # the reader is slow, not gone
        pass
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Drop all output to ``stream``, also what is buffered, of which Python would complain at its exit."""
    with suppress(OSError, ValueError):  # a stream that a test or a caller put there has no descriptor
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def print_line(text: str) -> None:
    """Write ``text`` as a line that says that it is of ProTrain."""
    say(f"protrain: {text}")


@contextmanager
def stage(what: str) -> Iterator[Callable[..., None]]:
    """Run the body as one stage. The body is given a function to tell what it is doing.

    The function takes the name of a part, and perhaps the share of the stage that is done, from 0 to 1. A part is only
    printed if the stage takes time, and ever more seldom. A line at the end says how long the stage took.
    """
    start_s = time.perf_counter()
    pause_s = _LONG_S
    next_s = start_s + pause_s

    def tell(part: str, share: float | None = None) -> None:
        nonlocal next_s, pause_s
        now_s = time.perf_counter()
        if now_s >= next_s:
            done = "" if share is None else f", {share:.0%}"
            print_line(f"{what}, {now_s - start_s:.0f} s{done}: {part}")
            pause_s *= 2
            next_s = now_s + pause_s

    yield tell
    print_line(f"{what}: {time.perf_counter() - start_s:.1f} s")
