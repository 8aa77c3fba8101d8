"""The processes of a command, one for each GPU: `--gpus N` starts N of it, of which one speaks, and they end together.

torchrun would do, but it kills processes that need more than 30 s to save when they are told to stop, and it prints a
report of its own beside the error of a process. What the processes see is the same: torchrun's variables, and a store
in the launcher by which they find each other. So torchrun or srun may start them as well. Without a launcher there is
one process.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch.distributed as dist

from protrain.common.progress import heard, say
from protrain.common.signals import InterruptedRun, StopRequests, stop_requests
from protrain.distributed.joining import announced_by_slurm, announced_processes, own_store, start_group

_LOOK_S = 0.05  # the time between two looks at the processes
_GRACE_S = 15.0  # the time that the others have to end by themselves once one has failed
_GRACE_AT_ONCE_S = 3.0  # the same after a second request to stop
_HOST = "127.0.0.1"
_runs = itertools.count()  # of this process: all ranks count alike, so that each run has a key of its own
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


def launched(args: argparse.Namespace) -> bool:
    """Whether the command was run in as many processes as ``--gpus`` asks for, which this one has started.

    If not, this process is to run it, alone or as one of those that a launcher has started.

    Raises:
        ValueError: a launcher has started another number of processes.
        SystemExit: the processes have failed, with their status.
    """
    os.environ.update(announced_by_slurm(os.environ))
    announced = announced_processes()
    gpus = args.gpus or announced
    if announced == 1 and gpus > 1:
        if status := launch(gpus, args.words):
            raise SystemExit(status)
        return True
    if gpus != announced:
        raise ValueError(f"--gpus {gpus}: {announced} processes were started, each for one GPU; leave --gpus out")
    return False


def launch(count: int, words: Sequence[str]) -> int:
    """Run ``protrain WORDS`` in ``count`` processes. Returns the status of the first that failed, or 0.

    Signals that ask to stop are passed on. No process is left when this returns or raises. If the launcher itself is
    killed, the processes are told to stop.
    """
    with stop_requests() as requests:
        store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        shared = {
            **os.environ,
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the first process is to use this store, not to start one
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        processes: list[subprocess.Popen[bytes]] = []
        end_with_parent = _end_with_parent()
        try:
            for rank in range(count):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "protrain", *words],
                        env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        preexec_fn=end_with_parent,
                    )
                )
            return _wait(processes, requests, command=words[0])
        except KeyboardInterrupt:
            _send(processes, requests.received)
            end_s = time.monotonic() + _GRACE_AT_ONCE_S
            while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
                time.sleep(_LOOK_S)
            return 128 + requests.received
        finally:
            _send(processes, signal.SIGKILL)
            for process in processes:
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], requests: StopRequests, *, command: str) -> int:
    """Wait until all ``processes`` have ended, or one has failed and the others had time to end as well."""
    statuses: dict[int, int] = {}  # by rank, in the order in which processes end
    end_s = float("inf")
    is_passed_on = False
    while len(statuses) < len(processes) and time.monotonic() < end_s:
        if requests.received and not is_passed_on:
            is_passed_on = True
            _send(processes, requests.received)
        for rank, process in enumerate(processes):
            status = process.poll()
            if status is None or rank in statuses:
                continue
            statuses[rank] = status if status >= 0 else 128 - status
            if status < 0 and -status != requests.received:
                say(f"protrain {command}: the process of GPU {rank} was ended by {signal.Signals(-status).name}")
            if status and end_s == float("inf"):
                end_s = time.monotonic() + _GRACE_S
        time.sleep(_LOOK_S)
    # A process that fails because another has failed says nothing and has status 1.
    return next((status for status in statuses.values() if status > 1), max(statuses.values()))


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        process.send_signal(number)  # nothing, to one that has ended and whose status is known


def _end_with_parent() -> Callable[[], None] | None:
    """A function for a new process to call, so that it is told to stop if this one ends without having done so."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here, because little may be done between fork and exec

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return end_with_parent


@contextmanager
def together() -> Iterator[int]:
    """Join the processes that a launcher has started. The context is the number of this one, its rank.

    Only the first one speaks inside: progress and warnings of the others would be the same. If the body raises on some
    of them, the exception leaves on the first that fails, whichever it is. The others end without a word, as they fail
    by the same error or because that one is gone.
    """
    if announced_processes() == 1:
        yield 0
        return
    if starts := not dist.is_initialized():
        start_group()
    rank = dist.get_rank()
    failures = f"protrain {next(_runs)}: failures"
    store = own_store()  # now, as nobody can connect to it once the launcher is killed
    try:
        with heard(rank == 0), warnings.catch_warnings(action="ignore") if rank else nullcontext():
            yield rank
    except (Exception, KeyboardInterrupt) as error:
        try:
            fails_first = store.add(failures, 1) == 1
        except dist.DistError:  # the launcher is gone, or the first process where no launcher has the store
            fails_first = rank == 0
        if fails_first:
            raise
        raise SystemExit(128 + error.signal_number if isinstance(error, InterruptedRun) else 1) from None
    finally:
        if starts:
            with suppress(Exception):  # after an error others may be gone
                dist.destroy_process_group()
