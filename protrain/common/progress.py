"""Reports every stage that takes time by one line on standard error."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_BAR_WIDTH = 24
_CLEAR = "\r\033[K"  # clears the line of a terminal
_BEGUN_S = 2.0  # a stage that is shorter than this prints only one line, at its end
_LONG_S = 20.0  # a stage that is longer than this also says what it is doing
_BLINK_S = 1.0


COUNTED = (
    "the GPU has too little memory to run the model for its profile: memory is counted from shapes, and times are "
    "estimated"
)


_is_heard = True


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, nothing of this module is written, as for all but the first of several processes that do the same."""
    global _is_heard
    _is_heard, before = False, _is_heard
    try:
        yield
    finally:
        _is_heard = before


class StandardError(io.TextIOBase):
    """The present standard error, whose reader may leave: `tee` may end, or a terminal may be closed.

    Messages there are only for people and must not end a training run. Once nobody reads them, they are dropped.
    """

    def __init__(self) -> None:
        # None if the process has no standard error, or is one that is unheard
        self._stream: Any = sys.stderr if _is_heard else None

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class has a property too, whatever its stub says
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal where a line can be written over.

        Under a display of rich, as Lightning's Trainer has one, it is none: rich puts each piece on a line of its own.
        """
        if self._stream is None or hasattr(self._stream, "rich_proxied_file"):
            return False
        return bool(self._stream.isatty())

    def write(self, text: str) -> int:
        """Write ``text``, or drop it if nobody reads it."""
        self._call("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush, unless nobody reads the stream."""
        self._call("flush")

    def _call(self, method: str, *args: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, method)(*args)
        except BlockingIOError:  # the reader is slow, not gone
            pass
        except OSError:
            silence(self._stream)


def silence(stream: TextIO) -> None:
    """Drop all output to ``stream``, also what is buffered, of which Python would complain at its exit."""
    with suppress(OSError, ValueError):  # a stream that a test or a caller put there has no descriptor
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def say(text: str, *, end: str = "\n") -> None:
    """Write ``text`` to standard error, if anybody reads it."""
    print(text, end=end, file=StandardError(), flush=True)


class Progress:
    """Prints the stages of a long call and how long each took. It is silent unless ``enabled``."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

    def note(self, text: str) -> None:
        """Print ``text`` as a line by itself."""
        if self.enabled:
            say(f"protrain: {text}")

    @contextmanager
    def stage(self, what: str) -> Iterator[Callable[[str], None]]:
        """Run the body as one stage. The body is given a function to tell what it is doing, which a long stage shows.

        A terminal shows the stage while it runs. Elsewhere a line is printed if the stage takes time, and further
        lines, ever more seldom, if it goes on.
        """
        if not self.enabled:
            yield lambda part: None
            return
        live = StandardError().isatty()
        start = time.perf_counter()
        doing = ""
        done = threading.Event()

        def tell(part: str) -> None:
            nonlocal doing
            doing = part

        def go_on_saying() -> None:
            pauses = itertools.repeat(_BLINK_S) if live else iter(_pauses())
            while not done.wait(next(pauses)):
                past_s = time.perf_counter() - start
                line = f"protrain: {what} ..."
                if past_s >= _LONG_S:  # fits into 80 columns with the path of a layer
                    line = f"protrain: {what}, {past_s:.0f} s: {doing or 'so far'}"
                if live:
                    line = f"{_CLEAR}{line[: shutil.get_terminal_size().columns - 1]}"
                say(line, end="" if live else "\n")

        if live:
            say(f"protrain: {what} ...", end="")
        speaker = threading.Thread(target=go_on_saying, name="protrain-progress", daemon=True)
        speaker.start()
        try:
            yield tell
        finally:
            done.set()
            speaker.join()
            if live:
                say(_CLEAR, end="")
        say(f"protrain: {what}: {time.perf_counter() - start:.1f} s")

    @contextmanager
    def bar(self, what: str) -> Iterator[Callable[[str, float], None]]:
        """Run the body, which is given a function to call with the next part's name and the share done, from 0 to 1.

        A terminal shows a bar while the body runs. Elsewhere one line at the end says how long it took.
        """
        live = self.enabled and StandardError().isatty()

        def show(part: str, done: float) -> None:
            if live:
                full = round(_BAR_WIDTH * done)
                line = f"protrain: {what} [{'#' * full}{'.' * (_BAR_WIDTH - full)}] {100 * done:3.0f}% {part}"
                columns = shutil.get_terminal_size().columns
                say(f"{_CLEAR}{line[: columns - 1]}", end="")

        start = time.perf_counter()
        show("", 0.0)
        try:
            yield show
        finally:
            if live:
                say(_CLEAR, end="")
        if self.enabled:
            say(f"protrain: {what}: {time.perf_counter() - start:.1f} s")


def _pauses() -> Iterator[float]:
    """The seconds between two lines outside a terminal."""
    yield _BEGUN_S
    pause = _LONG_S
    while True:
        yield pause
        pause *= 2
