"""One contestant on several GPUs: a process for each, a rank, and what the outcomes of all ranks make together.

torchrun gives its workers sessions of their own, so they would go on where a time limit kills it. Here the launcher
starts the ranks itself, with the environment that torchrun would give them, and can end each of them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from bench.train.results import UNFINISHED, Outcome
from protrain.distributed.joining import announced_processes
from protrain.hardware.memory import usable_cores

_HOST = "127.0.0.1"
POLL_S = 0.2  # between two looks at processes that run
_FRAMES = 4  # of a stack that are shown
_PEAKS = (
    *("device_allocated_bytes", "device_reserved_bytes", "device_other_bytes"),
    *("host_resident_bytes", "host_pinned_bytes"),
)


@contextmanager
def environments(gpus: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank, as torchrun would make it. One rank alone has this process's own.

    The ranks find each other through a store in this process, which lives as long as the context. A port that rank 0
    is told to listen on may be taken by then.
    """
    if gpus == 1:
        yield [dict(os.environ)]
        return
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    common = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // gpus)),  # torch's own would be all cores for each rank
        "GLOO_SOCKET_IFNAME": "lo",  # a host name that resolves to nothing would stop gloo
        **os.environ,
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
        **{"MASTER_ADDR": _HOST, "MASTER_PORT": str(store.port)},
        **{"WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)},
    }
    yield [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(gpus)]


def run_ranks(command: list[str], gpus: int) -> int:
    """Run ``command`` as so many ranks, and return the exit status of the first that fails, or 0.

    The others are killed then, as they would wait for the one that failed.
    """
    with environments(gpus) as of_ranks:
        processes = [subprocess.Popen(command, env=environment) for environment in of_ranks]
        try:
            while True:
                statuses = [process.poll() for process in processes]
                failed = next((status for status in statuses if status), 0)
                if failed or None not in statuses:
                    return failed
                time.sleep(POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def file_of(path: Path, rank: int) -> Path:
    """Where ``rank`` writes what rank 0 writes to ``path``."""
    return path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """Rank 0's outcome, with the largest peak of memory of all ranks."""
    return replace(outcomes[0], **{name: max(getattr(each, name) for each in outcomes) for name in _PEAKS})


def first_error(out: Path, outcomes: Sequence[Outcome], statuses: Sequence[int | None], log: Path) -> str:
    """Why the ranks failed, as one of them says or as its exit status does; "" if none has.

    A rank that fails takes others with it, which wait for it and then fail in another way. So the error is that of the
    rank whose last words, in its outcome or in its log, are the oldest.

    Args:
        out: rank 0's outcome file; see ``file_of``.
        outcomes: of all ranks, as far as they had come.
        statuses: their exit statuses; None: still running.
        log: what rank 0 printed; see ``file_of``.
    """
    last_words_ns = {}  # by the ranks that failed
    for rank, (outcome, status) in enumerate(zip(outcomes, statuses, strict=True)):
        if outcome.error not in ("", UNFINISHED):
            last_words_ns[rank] = file_of(out, rank).stat().st_mtime_ns
        elif outcome.error and status is not None:
            last_words_ns[rank] = file_of(log, rank).stat().st_mtime_ns
    if not last_words_ns:
        return ""
    rank = min(last_words_ns, key=last_words_ns.__getitem__)
    error, status = outcomes[rank].error, statuses[rank] or 0
    if error != UNFINISHED:
        pass
    elif status == -signal.SIGKILL:
        error = "killed (SIGKILL): out of host memory?"
    elif status < 0:
        error = f"died of {signal.Signals(-status).name}: {_last_line(file_of(log, rank))}"
    else:
        error = f"exit status {status}: {_last_line(file_of(log, rank))}"
    return error if len(outcomes) == 1 else f"rank {rank}: {error}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def where_it_stood(log: Path) -> str:
    """Where the worker that wrote ``log`` stood when its time was up: the innermost lines of its main thread.

    "" when it has not said so. A worker has faulthandler write the stacks of all threads, the main thread's last.
    """
    stack = log.read_text(errors="replace").rpartition("(most recent call first):")[2]
    lines = re.findall(r'File ".*?([^/"]+)", line (\d+) in (.+)', stack)[:_FRAMES]
    return "".join(
        f"{'; it stood in ' if not at else ', called by '}{name} ({file}:{line})"
        for at, (file, line, name) in enumerate(lines)
    )


def start_group(backend: str) -> None:
    """Start the default process group of all ranks, or of this process alone, without a network."""
    if announced_processes() > 1:
        dist.init_process_group(backend)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(_HOST, 0, world_size=1, is_master=True)
    # What torchrun would set: DeepSpeed looks for it.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR=_HOST, MASTER_PORT=str(store.port))
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def any_rank(value: bool) -> bool:
    """Whether ``value`` holds on any rank. Ranks that have no process group do not wait for each other."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    found = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())
