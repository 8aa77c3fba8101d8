"""Folders that one process at a time may write to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def used_alone(folder: Path, remedy: str) -> Iterator[None]:
    """Inside, no other process, and no other thread, has a context of this kind for ``folder``, which exists.

    The lock of a killed process ends by itself. File systems without locks on folders have none, as NFS.

    Raises:
        OSError: somebody else has such a context. ``remedy`` says what to do about it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(f"another process writes to {folder} at this moment: {remedy}") from None
        except OSError:
            pass
        yield
    finally:
        with suppress(OSError):  # unlocks it also for child processes that have a copy
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
