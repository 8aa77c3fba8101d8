"""Stands for ``subprocess`` where a benchmark starts workers: forked from a process that has imported everything.

A worker that is started as the benchmark does takes seconds to import torch and transformers.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

from tests.distributed.warm import Process


def run_python(how: str, arguments: list[str], folder: Path | None) -> None:
    """What ``python -m`` or ``python -c`` does with these arguments in ``folder``, in a session of its own."""
    os.setsid()
    if folder is not None:
        os.chdir(folder)
    sys.argv = arguments
    if how == "-c":
        exec(arguments[0], {"__name__": "__main__"})
    else:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class Forked:
    """A ``subprocess.Popen`` of ``[python, "-m", module, ...]`` or ``[python, "-c", code, ...]``."""

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] = os.environ,
        stdout: Any = None,
        cwd: Path | None = None,
        **_: Any,
    ) -> None:
        python, how, *arguments = command
        assert python == sys.executable
        assert how in ("-c", "-m")
        printed = None if stdout is None else Path(stdout.name)
        self._process = Process(run_python, how, arguments, cwd, environment=env, printed=printed)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.status

    def kill(self) -> None:
        self._process.send(signal.SIGKILL)

    def wait(self) -> int:
        while (status := self.poll()) is None:
            sleep(0.02)
        return status


class ForkedWorkers:
    """``subprocess`` for a benchmark that starts workers by ``Popen`` or ``run``."""

    STDOUT = subprocess.STDOUT
    Popen = Forked

    @staticmethod
    def run(command: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=Forked(command).wait())
