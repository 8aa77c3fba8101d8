"""Groups of processes of their own, for tests in which ranks get out of step, raise or die."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tests.distributed.warm import Process

# All ends within it on a loaded machine, too, but for what hangs or waits for the half hour of a process group.
LIMIT_S = 240.0


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    status: int  # negative: the signal that killed it
    errors: list[str]  # the last lines of tracebacks
    text: str  # all that it has printed


def environments(size: int) -> list[dict[str, str]]:
    """What torchrun would tell each of ``size`` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{k: str(v) for k, v in {**known, "RANK": rank, "LOCAL_RANK": rank}.items()} for rank in range(size)]


class Group:
    """``size`` ranks that each run ``function(rank, size, *args)``, and print to files in ``folder``.

    ``frees_modules`` is for tests in which Python's end matters (:class:`~tests.distributed.warm.Process`).
    """

    def __init__(
        self, size: int, function: Callable[..., None], *args: Any, folder: Path, frees_modules: bool = False
    ) -> None:
        self._printed = [folder / f"rank{rank}.txt" for rank in range(size)]
        self._processes = [
            Process(function, rank, size, *args, environment=environment, printed=path, frees_modules=frees_modules)
            for rank, (environment, path) in enumerate(zip(environments(size), self._printed, strict=True))
        ]

    def text(self, rank: int) -> str:
        """What ``rank`` has printed so far. Torch puts the rank before the lines of an uncaught exception."""
        path = self._printed[rank]
        return path.read_text().replace(f"[rank{rank}]: ", "") if path.exists() else ""

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached`` says so, while all ranks run."""
        end = monotonic() + LIMIT_S
        while not reached():
            if monotonic() > end or any(process.status is not None for process in self._processes):
                raise AssertionError("\n".join(self.text(rank) for rank in range(len(self._processes))))
            sleep(0.02)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to ``rank``."""
        self._processes[rank].send(number)

    def endings(self, ranks: Sequence[int], *, timeout_s: float = LIMIT_S) -> dict[int, Ending]:
        """Wait until ``ranks`` have ended."""
        end = monotonic() + timeout_s
        while any(self._processes[rank].status is None for rank in ranks):
            if monotonic() > end:
                printed = {rank: self.text(rank) for rank in ranks}
                raise AssertionError(f"a rank still runs after {timeout_s} s: {printed}")
            sleep(0.05)
        return {rank: self._ending(rank) for rank in ranks}

    def _ending(self, rank: int) -> Ending:
        status, text = self._processes[rank].status, self.text(rank)
        assert status is not None
        return Ending(status, _errors(text), text)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.send(signal.SIGKILL)
        self.endings(range(len(self._processes)))


def _errors(text: str) -> list[str]:
    """The last line of each Python traceback in ``text``. NCCL prints lines of its own that look like errors."""
    lines = iter(text.splitlines())
    return [
        next((line for line in lines if not line.startswith(" ")), "")
        for line in lines
        if line == "Traceback (most recent call last):"
    ]
