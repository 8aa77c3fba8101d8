"""One line on standard error for every stage that takes time, so that nobody wonders what is going on."""

from __future__ import annotations

import itertools
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_BAR_WIDTH = 24
_CLEAR = "\r\033[K"  # a terminal's line
_BEGUN_S = 2.0  # a shorter stage is one line, at its end
_LONG_S = 20.0  # from here on what a stage is doing is of interest
_BLINK_S = 1.0


COUNTED = (
    "the GPU has too little memory to run the model for its profile: memory is counted from shapes, and times are "
    "estimated"
)


class Progress:
    """Prints the stages of a long call and how long each took; silent when not ``enabled``."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

    def note(self, text: str) -> None:
        """A line by itself."""
        if self.enabled:
            print(f"protrain: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def stage(self, what: str) -> Iterator[Callable[[str], None]]:
        """Run the body as one stage. What it is given takes what it is doing, which is shown when that takes long.

        A terminal shows the stage while it runs; elsewhere a line says that it began, once it takes time, and further
        ones, ever more seldom, that it goes on.
        """
        if not self.enabled:
            yield lambda part: None
            return
        live = sys.stderr.isatty()
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
                said = f"{what} ..." if past_s < _LONG_S else f"{what}, {past_s:.0f} s so far ..."
                line = f"protrain: {said} {doing if past_s >= _LONG_S else ''}".rstrip()
                if live:
                    line = f"{_CLEAR}{line[: shutil.get_terminal_size().columns - 1]}"
                print(line, end="" if live else "\n", file=sys.stderr, flush=True)

        if live:
            print(f"protrain: {what} ...", end="", file=sys.stderr, flush=True)
        speaker = threading.Thread(target=go_on_saying, name="protrain-progress", daemon=True)
        speaker.start()
        try:
            yield tell
        except BaseException:
            done.set()
            speaker.join()
            if live:
                print(_CLEAR, end="", file=sys.stderr, flush=True)
            raise
        done.set()
        speaker.join()
        print(
            f"{_CLEAR if live else ''}protrain: {what}: {time.perf_counter() - start:.1f} s",
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


def _pauses() -> Iterator[float]:
    """Seconds between lines outside a terminal."""
    yield _BEGUN_S
    pause = _LONG_S
    while True:
        yield pause
        pause *= 2
