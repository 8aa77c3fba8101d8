"""Starts contestants one after another, each as a process for every GPU or, as LLM.Q, as one for all.

What ends one early (no memory, no time, no package) becomes its outcome.
"""

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
from bench.train.ranks import POLL_S, environments, file_of, first_error, together, where_it_stood
from bench.train.results import UNFINISHED, Outcome
from bench.train.task import Job, Task
from protrain.hardware.memory import available_host_bytes

_OTHERS_S = 2.0  # for the other ranks to end by themselves when one has failed
_GRACE_S = 20.0  # for a worker to end after the last step that it may begin


def take_part(contestant: Contestant, task: Task, folder: Path, *, limit_s: float) -> Outcome:
    """Run ``contestant`` for at most ``limit_s``, with the files of the run in ``folder``.

    The outcome is also written to ``folder``, where the floor finds its plan.
    """
    out = folder / f"{contestant.name}.json"
    reason = _cannot(contestant, folder, gpus=task.gpus)
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
        log = folder / f"{contestant.name}.log"
        ranks = 1 if KINDS[contestant.kind].one_process else task.gpus
        outcome = supervise(command, contestant, out, log, limit_s=limit_s, gpus=ranks)
    outcome.save(out)
    return outcome


def supervise(
    command: list[str], contestant: Contestant, out: Path, log: Path, *, limit_s: float, gpus: int = 1
) -> Outcome:
    """Run ``command`` as so many ranks, which are to write an Outcome each, and watch the machine's memory meanwhile.

    Rank 0 writes to ``out``, the others beside it. When one fails, all are ended. Where ranks are ended from outside,
    what they had written by then is kept.
    """
    start = time.monotonic()
    ends = start + limit_s
    available = least = available_host_bytes()
    statuses: list[int | None] = []
    with _ending_on_signals(), _started(command, log, gpus) as processes:
        while time.monotonic() < ends:
            statuses = [process.poll() for process in processes]
            if None not in statuses:
                break
            if any(statuses):
                ends = min(ends, time.monotonic() + _OTHERS_S)
            least = min(least, available_host_bytes())
            time.sleep(POLL_S)
        statuses = [process.poll() for process in processes]
    unfinished = Outcome(contestant=contestant, error=UNFINISHED)
    files = [file_of(out, rank) for rank in range(gpus)]
    outcomes = [Outcome.load(file) if file.exists() else unfinished for file in files]
    error = first_error(out, outcomes, statuses, log)
    if not error and None in statuses:
        error = f"not done within {limit_s:.0f} s{where_it_stood(log)}"
    return replace(together(outcomes), error=error, host_used_bytes=available - least, host_available_bytes=available)


@contextlib.contextmanager
def _started(command: list[str], log: Path, gpus: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks' processes, which have ended, with all that they started, when the context is left."""
    processes: list[subprocess.Popen[bytes]] = []
    with environments(gpus) as of_ranks:
        try:
            for rank, environment in enumerate(of_ranks):
                with open(file_of(log, rank), "wb") as sink:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment,
                            stdout=sink,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # so that the compiler's processes can be ended with it
                        )
                    )
            yield processes
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()


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


def _cannot(contestant: Contestant, folder: Path, *, gpus: int) -> str:
    """Why ``contestant`` is not started at all; "" when it is."""
    kind = KINDS[contestant.kind]
    if gpus > 1 and not kind.several_gpus:
        return f"skipped: {contestant.kind} runs on one GPU here, not on {gpus}"
    if kind.needs_gpu and not torch.cuda.is_available():
        return "skipped: it needs a GPU"
    absent = [package for package in kind.packages if find_spec(package) is None]
    if absent:
        return f"skipped: {absent[0]} is not installed (pip install {absent[0].replace('_', '-')})"
    planner = contestant.planned_by
    if planner is not None and Outcome.load(folder / f"{planner.name}.json").plan is None:
        return f"skipped: {planner.name} has no plan to follow"
    return ""
