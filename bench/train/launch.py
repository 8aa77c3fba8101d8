"""Starts workers one after another; what ends one early (no memory, no time, no package) becomes its outcome."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import torch

from bench.train.contestants import KINDS, Contestant
from bench.train.results import UNFINISHED, Outcome
from bench.train.task import Job, Task
from protrain.hardware.memory import available_host_bytes

_POLL_S = 0.2
_GRACE_S = 20.0  # for a worker to end after the last step that it may begin


def take_part(contestant: Contestant, task: Task, folder: Path, *, limit_s: float) -> Outcome:
    """Run ``contestant`` for at most ``limit_s``, with the files of the run in ``folder``.

    The outcome is also written to ``folder``, where the floor finds its plan.
    """
    out = folder / f"{contestant.name}.json"
    reason = _cannot(contestant, folder)
    if reason:
        outcome = Outcome(contestant=contestant, error=reason)
    else:
        planner = contestant.planned_by
        job = Job(
            task=task,
            contestant=contestant,
            tokens=str(folder / "tokens.pt"),
            planned_by=None if planner is None else str(folder / f"{planner.name}.json"),
            until=time.time() + limit_s - min(_GRACE_S, limit_s / 4),
        )
        job.save(folder / "job.json")
        command = [sys.executable, "-m", "bench.train.worker", str(folder / "job.json"), str(out)]
        outcome = supervise(command, contestant, out, folder / f"{contestant.name}.log", limit_s=limit_s)
    outcome.save(out)
    return outcome


def supervise(command: list[str], contestant: Contestant, out: Path, log: Path, *, limit_s: float) -> Outcome:
    """Run ``command``, which is to write an Outcome to ``out``, and watch the machine's memory meanwhile.

    Where it is ended from outside, what it had written by then is kept.
    """
    start = time.monotonic()
    available = least = available_host_bytes()
    with open(log, "wb") as sink, _ending_on_signals():
        # A session of its own, so that what the worker starts ends with it.
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() - start < limit_s:
                least = min(least, available_host_bytes())
                time.sleep(_POLL_S)
        finally:
            late = process.poll() is None
            if late or process.returncode < 0:  # killed alone, it leaves the compiler's processes behind
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outcome = Outcome.load(out) if out.exists() else Outcome(contestant=contestant, error=UNFINISHED)
    outcome = replace(outcome, host_used_bytes=available - least, host_available_bytes=available)
    if outcome.error != UNFINISHED:
        return outcome
    if late:
        error = f"not done within {limit_s:.0f} s"
    elif process.returncode == -signal.SIGKILL:
        error = "killed (SIGKILL): out of host memory?"
    elif process.returncode < 0:
        error = f"died of {signal.Signals(-process.returncode).name}: {_last_line(log)}"
    else:
        error = f"exit status {process.returncode}: {_last_line(log)}"
    return replace(outcome, error=error)


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit: a worker has a session of its own, and is to be killed first.

    One that is ignored stays so (nohup relies on it), and so does one that a library has taken.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    changed = [one for one, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    for one in changed:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in changed:
            signal.signal(one, before[one])


def _cannot(contestant: Contestant, folder: Path) -> str:
    """Why ``contestant`` is not started at all; "" when it is."""
    kind = KINDS[contestant.kind]
    if kind.needs_gpu and not torch.cuda.is_available():
        return "skipped: it needs a GPU"
    if kind.package and find_spec(kind.package) is None:
        return f"skipped: {kind.package} is not installed (pip install {kind.package})"
    planner = contestant.planned_by
    if planner is not None and Outcome.load(folder / f"{planner.name}.json").plan is None:
        return f"skipped: {planner.name} has no plan to follow"
    return ""


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
