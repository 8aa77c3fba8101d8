"""A run's folder belongs to one process at a time, and a start that fails leaves nothing in it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protrain.cli.files import LOCK_FILE, UNFINISHED_DATA

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold ``folder``, made if missing, against other processes. The system lets go for a process that is killed.

    Where no run came of it, what it made is removed.

    Raises:
        ValueError: Another process trains there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder / UNFINISHED_DATA, ignore_errors=True)
        with suppress(OSError):  # while it is held: who opened it before sees that it is another file by then
            (folder / LOCK_FILE).unlink()
        with suppress(OSError):  # also for children that have a copy of it
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
        with suppress(OSError):  # of a folder that holds something
            for path in made:
                path.rmdir()


def _lock(folder: Path) -> int:
    """The open and locked file in ``folder``; open alone where the file system knows no locks."""
    path = folder / LOCK_FILE
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another start failed in between and removed its folder
            folder.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:  # between the last two looks
            pass
        except BlockingIOError:
            os.close(lock)
            raise ValueError(f"another process trains in {folder}: wait for it, or pick another --folder") from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return lock
            os.close(lock)
            raise
        os.close(lock)  # its holder removed it and was done: the next one is ours or another's
