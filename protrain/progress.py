"""One line on standard error for every stage that takes time, so that nobody wonders what is going on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Prints the stages of a long call and how long each took; silent when not ``enabled``."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled

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
        yield
        print(
            f"{chr(13) if live else ''}protrain: {what}: {time.perf_counter() - start:.1f} s",
            file=sys.stderr,
            flush=True,
        )
