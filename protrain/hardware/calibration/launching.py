"""A core that is taken, as one is in a step: by the thread that launches kernels and then spins until they are done."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

_PIECE = bytes(256 * 1024)  # stays in the core's own cache


@contextlib.contextmanager
def one_core_taken(*, wanted: bool = True) -> Iterator[None]:
    """Keep one core busy inside, without its memory and without the GIL."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            hashlib.sha256(_PIECE)  # releases the GIL

    thread = threading.Thread(target=work, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()
