"""The processes of one command: they start as ranks of one group, the first one speaks, an error is told once.

A launcher such as torchrun or srun starts the same command once for each GPU, and `--gpus` does so itself
(``protrain.cli.launch``). Without any of them there is one process, for which nothing here does anything.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch.distributed as dist

from protrain.cli.signals import InterruptedRun
from protrain.common.progress import unheard
from protrain.distributed.joining import start_group
from protrain.distributed.processes import announced_processes

_runs = itertools.count()  # of this process: all ranks count alike, so that each run has a key of its own


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
    starts = not dist.is_initialized()
    if starts:
        start_group()
    rank = dist.get_rank()
    failures = f"protrain {next(_runs)}: failures"
    try:
        with ExitStack() as silence:
            if rank:
                silence.enter_context(warnings.catch_warnings(action="ignore"))
                silence.enter_context(unheard())
            yield rank
    except (Exception, KeyboardInterrupt) as error:
        if _fails_first(failures):
            raise
        raise SystemExit(128 + error.signal_number if isinstance(error, InterruptedRun) else 1) from None
    finally:
        if starts:
            with suppress(Exception):  # after an error others may be gone
                dist.destroy_process_group()


def _fails_first(key: str) -> bool:
    """Whether no process has called this before, in the run that ``key`` stands for."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    try:
        return store.add(key, 1) == 1
    except dist.DistError:  # who has the store is gone: the launcher, or the first process where no launcher has one
        return dist.get_rank() == 0
