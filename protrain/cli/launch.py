"""The processes of a command, one for each GPU: `--gpus N` is torchrun, and of its processes one speaks.

torchrun or srun may start them as well. Without a launcher there is one process.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from protrain.common.progress import heard, silence
from protrain.distributed.joining import announced_by_slurm, announced_processes, own_store, start_group

_SAVE_S = 3600  # torchrun kills processes that need longer to end, and a save of a large model takes minutes
_runs = itertools.count()  # of this process: all ranks count alike, so that each run has a key of its own


def start_ranks(gpus: int | None, words: Sequence[str]) -> None:
    """Start torchrun with ``gpus`` processes of `protrain WORDS`, unless a launcher has started this process.

    Raises:
        ValueError: a launcher has started another number of processes.
        SystemExit: the processes have ended, with the status of the one that failed first. It has said why.
        OSError: a process was killed.
    """
    os.environ.update(announced_by_slurm(os.environ))
    announced = announced_processes()
    if announced == 1 and (gpus or 1) > 1:
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVE_S))
        PContext.close.__defaults__ = (None, _SAVE_S)  # which is the only place for it before torch 2.13
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes speak for themselves
        torchrun = ["--standalone", "--nproc-per-node", str(gpus), "-m", "protrain", *words]
        try:
            run.run(run.parse_args(torchrun))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                raise OSError(f"the process of rank {rank} was ended by {failure.signal_name()}") from None
            raise SystemExit(failure.exitcode) from None
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None
        raise SystemExit(0)
    if gpus not in (None, announced):
        raise ValueError(f"--gpus {gpus}: {announced} processes were started, each for one GPU; leave --gpus out")


@contextmanager
def together() -> Iterator[int]:
    """Join the processes that a launcher has started. The context is the number of this one, its rank.

    Only the first one speaks inside: progress and warnings of the others would be the same. If the body raises on some
    of them, the first that fails says why, whichever it is. The others end without a word, as they fail by the same
    error or because that one is gone.
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
    except (Exception, KeyboardInterrupt):
        try:
            fails_first = store.add(failures, 1) == 1
        except dist.DistError:  # the launcher is gone, or the first process where no launcher has the store
            fails_first = rank == 0
        if not fails_first:
            silence(sys.stderr)
        raise
    finally:
        if starts:
            with suppress(Exception):  # after an error others may be gone
                dist.destroy_process_group()
