"""Processes of their own, for tests in which ranks get out of step, raise or die.

Each is an interpreter that runs one function and ends as a script ends: an exception reaches ``sys.excepthook``, and
what is to be done at the end is done. To import torch takes seconds, so a template does it once, and the processes are
forked from it. This file is also the script that the template runs.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    status: int  # negative: the signal that killed it
    errors: list[str]  # the last lines of tracebacks
    text: str  # all that it has printed


class Group:
    """``size`` ranks that each run ``function(rank, size, *args)``, a function of ``tests.distributed.out_of_step``."""

    def __init__(self, size: int, function: str, *args: Any, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._printed = [folder / f"rank{rank}.txt" for rank in range(size)]
        self._template = _template()
        self._pids = []
        for rank, path in enumerate(self._printed):
            known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            environment = {key: str(value) for key, value in known.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self._pids.append(self._template.fork(function, [rank, size, *args], environment, path))

    def text(self, rank: int) -> str:
        """What ``rank`` has printed so far. Torch puts the rank before the lines of an uncaught exception."""
        path = self._printed[rank]
        return path.read_text().replace(f"[rank{rank}]: ", "") if path.exists() else ""

    def wait_for(self, text: str, *, rank: int, timeout_s: float = 60.0) -> None:
        """Wait until ``rank`` has printed ``text``."""
        end = monotonic() + timeout_s
        while text not in self.text(rank):
            assert monotonic() < end, f"rank {rank} does not print {text!r}: {self.text(rank)}"
            sleep(0.01)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to ``rank``."""
        os.kill(self._pids[rank], number)

    def endings(self, ranks: Sequence[int], *, timeout_s: float) -> dict[int, Ending]:
        """Wait until ``ranks`` have ended."""
        end = monotonic() + timeout_s
        while any(self._template.status(self._pids[rank]) is None for rank in ranks):
            if monotonic() > end:
                printed = {rank: self.text(rank) for rank in ranks}
                raise AssertionError(f"a rank still runs after {timeout_s} s: {printed}")
            sleep(0.05)
        return {rank: self._ending(rank) for rank in ranks}

    def _ending(self, rank: int) -> Ending:
        status, text = self._template.status(self._pids[rank]), self.text(rank)
        assert status is not None
        starts = [line.split(":")[0] for line in text.splitlines()]
        found = zip(starts, text.splitlines(), strict=True)
        return Ending(status, [line for start, line in found if start.endswith("Error") and " " not in start], text)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            if self._template.status(pid) is None:
                os.kill(pid, signal.SIGKILL)
        self.endings(range(len(self._pids)), timeout_s=10)


class _Template:
    """The process that has imported everything, from which ranks are forked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.apart"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self._process.kill)

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def fork(self, function: str, args: list[Any], environment: dict[str, str], path: Path) -> int:
        """Start ``function(*args)`` in a process that prints to ``path``. Returns its id."""
        pid: int = self._ask(function, args, environment, str(path))
        return pid

    def status(self, pid: int) -> int | None:
        """The exit status of a process. None: it runs."""
        status: int | None = self._ask(pid)
        return status


_templates: list[_Template] = []


def _template() -> _Template:
    if not _templates:
        _templates.append(_Template())
    return _templates[0]


def _serve() -> None:
    """Answer requests as the template. In each process that it forks, this runs what is asked for."""
    module = importlib.import_module("tests.distributed.out_of_step")
    statuses: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if len(request) == 1:
            (pid,) = request
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps(statuses.get(pid)), flush=True)
            continue
        function, args, environment, path = request
        pid = os.fork()
        if not pid:
            os.environ.update(environment)
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            getattr(module, function)(*args)
            return
        print(pid, flush=True)


if __name__ == "__main__":
    _serve()
