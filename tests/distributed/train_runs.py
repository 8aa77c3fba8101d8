"""Runs of `protrain train` on a CPU: the command line, its processes, and what a run is compared by."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.warm import Process


def command(**options: Any) -> list[str]:
    """The command line with ``options``, and with those that all these runs have."""
    every = {
        "device": "cpu",
        "learning_rate": 0.01,
        "evaluate_every": 2,
        "checkpoint_every": 0,
        "threads": 1,
        **options,
    }
    words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in every.items()]
    return ["train", *(word for pair in words for word in pair)]


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on how a step is divided: the numbers of all steps, the weights and the sample."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "gradient_norm", "learning_rate", "evaluation_loss")
    return {
        "rows": [{name: row[name] for name in kept if name in row} for row in rows],
        "weights": (folder / "model" / "model.safetensors").read_bytes(),
        "sample": (folder / "sample.txt").read_text(),
    }


class LaunchedRank(Process):
    """A ``subprocess.Popen`` of the launcher that is forked from a process that has imported everything."""

    def poll(self) -> int | None:
        return self.status

    def wait(self) -> int:
        while (status := self.status) is None:
            time.sleep(0.02)
        return status

    send_signal = Process.send


class LaunchedRanks:
    """Stands for ``subprocess`` in the launcher.

    Args:
        run: what the processes run, with the words of the command, in place of ``python -m protrain``.
        folder: where each of them has a file for what it prints.
    """

    def __init__(self, run: Callable[[Sequence[str]], None], folder: Path) -> None:
        self._run, self._folder = run, folder
        self.started: list[LaunchedRank] = []

    def Popen(self, command: Sequence[str], *, env: dict[str, str], **_: Any) -> LaunchedRank:
        assert command[:3] == [sys.executable, "-m", "protrain"]
        printed = self._folder / f"rank{len(self.started)}.txt"
        self.started.append(LaunchedRank(self._run, command[3:], environment=env, printed=printed))
        return self.started[-1]

    def said(self) -> list[str]:
        """All lines that the processes have printed, rank by rank."""
        paths = sorted(self._folder.glob("rank*.txt"))
        return [line for path in paths for line in path.read_text().splitlines()]

    def are_gone(self) -> bool:
        """Whether no process is left."""
        return bool(self.started) and all(process.status is not None for process in self.started)
