"""Stands for ``subprocess`` where a benchmark starts workers: forked from a process that has imported everything.

A worker that is started as the benchmark does takes seconds to import torch and transformers.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

from tests.distributed.warm import Process


def run_module(arguments: list[str]) -> None:
    """What ``python -m`` does with these arguments, in a session of its own."""
    os.setsid()
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class Forked:
    """A ``subprocess.Popen`` of ``[python, "-m", module, ...]``."""

    def __init__(
        self, command: list[str], *, env: Mapping[str, str] = os.environ, stdout: Any = None, **_: Any
    ) -> None:
        printed = None if stdout is None else Path(stdout.name)
        self._process = Process(run_module, command[2:], environment=env, printed=printed)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.status

    def wait(self) -> int:
        while (status := self.poll()) is None:
            sleep(0.02)
        return status


class ForkedLater:
    """The first command is started as ever, in as many processes as it is to have; those of others are forked."""

    STDOUT = subprocess.STDOUT

    def __init__(self) -> None:
        self._first: list[str] = []

    def Popen(self, command: list[str], **how: Any) -> Any:
        self._first = self._first or command
        return subprocess.Popen(command, **how) if command == self._first else Forked(command, **how)

    def run(self, command: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=self.Popen(command).wait())
