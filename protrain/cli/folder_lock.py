"""Locks a run's folder for one process at a time, and removes what a failed start left in it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from protrain.cli.run_files import LOCK_FILE, UNFINISHED_DATA


@contextmanager
def claimed(folder: Path, *, new: bool = False) -> Iterator[Path]:
    """Lock ``folder`` against other processes, and make it if it is missing. The context is the folder.

    The lock of a killed process ends by itself.

    If no run came of it, the folders that it made are removed.

    Args:
        folder: of a run.
        new: take no folder that exists. Runs of one model that begin in the same second get a number behind the name.

    Raises:
        ValueError: another process trains there, or it is a link that leads to no folder.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    if new:
        folder = _made(folder)
        made[:1] = [folder]
    else:
        try:
            Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)  # a link may lead to a folder to be made
        except FileExistsError:
            raise ValueError(f"--folder: {folder} is a link that leads to no folder: give another one") from None
    lock = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder / UNFINISHED_DATA, ignore_errors=True)
        # deleted while it is locked, so that whoever opened it before sees that it is another file by then
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
        with suppress(OSError):  # unlocks it also for child processes that have a copy
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
        with suppress(OSError):  # a folder with contents stays
            for path in made:
                path.rmdir()


def _made(folder: Path) -> Path:
    """A new folder of that name, or of the name and a number if there is one."""
    made = folder
    for number in count(2):
        try:
            made.mkdir(parents=True)
            break
        except FileExistsError:
            made = folder.with_name(f"{folder.name}-{number}")
    return made


def _lock(folder: Path) -> int:
    """Open and lock the lock file in ``folder``. It is only opened where the file system has no locks."""
    path = folder / LOCK_FILE
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # another start failed meanwhile and removed its folder
            folder.mkdir(parents=True, exist_ok=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:  # it was deleted between the last two calls
            pass
        except BlockingIOError:
            os.close(lock)
            raise ValueError(f"another process trains in {folder}: wait for it, or pick another --folder") from None
        except OSError:
            return lock
        os.close(lock)  # its holder deleted it, so a new file is needed
