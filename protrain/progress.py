"""One line on standard error for every stage that takes time, so that nobody wonders what is going on."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_BAR_WIDTH = 24
_CLEAR = "\r\033[K"  # a terminal's line


class Progress:
    """Prints the stages of a long call and how long each took; silent when not ``enabled``."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

    def note(self, text: str) -> None:
        """A line by itself."""
        if self.enabled:
            print(f"protrain: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Run the body as one stage."""
        if not self.enabled:
            yield
            return
        live = sys.stderr.isatty()
        if live:
            print(f"protrain: {what} ...", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            if live:
                print(_CLEAR, end="", file=sys.stderr, flush=True)
            raise
        print(
            f"{chr(13) if live else ''}protrain: {what}: {time.perf_counter() - start:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    @contextmanager
    def bar(self, what: str) -> Iterator[Callable[[str, float], None]]:
        """Run the body, which calls what it is given with its next part and how much is done, from 0 to 1.

        A terminal shows a bar while the body runs; elsewhere one line says at the end how long it took.
        """
        live = self.enabled and sys.stderr.isatty()

        def show(part: str, done: float) -> None:
            if live:
                full = round(_BAR_WIDTH * done)
                line = f"protrain: {what} [{'#' * full}{'.' * (_BAR_WIDTH - full)}] {100 * done:3.0f}% {part}"
                columns = shutil.get_terminal_size().columns
                print(f"{_CLEAR}{line[: columns - 1]}", end="", file=sys.stderr, flush=True)

        start = time.perf_counter()
        show("", 0.0)
        try:
            yield show
        finally:
            if live:
                print(_CLEAR, end="", file=sys.stderr, flush=True)
        if self.enabled:
            print(f"protrain: {what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
