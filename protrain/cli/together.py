"""The processes of one command: they start as ranks of one group, the first one speaks, an error is told once.

A launcher such as torchrun or srun starts the same command once for each GPU, and `--gpus` does so itself
(``protrain.cli.launch``). Without any of them there is one process, for which nothing here does anything.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from protrain.cli.signals import InterruptedRun
from protrain.common.progress import unheard
from protrain.distributed.joining import start_group
from protrain.distributed.processes import announced_processes

Value = TypeVar("Value")

_runs = itertools.count()  # of this process: all ranks count alike, so that each run has a key of its own


@dataclass(frozen=True)
class Processes:
    """The processes that run the command together, seen from one of them."""

    rank: int = 0
    size: int = 1

    def of_first(self, value: Value) -> Value:
        """The ``value`` of the first process, which may be any object that can be pickled. All must call it."""
        if self.size == 1:
            return value
        found: list[Any] = [value]
        dist.broadcast_object_list(found)
        result: Value = found[0]
        return result


@contextmanager
def together() -> Iterator[Processes]:
    """Join the processes that a launcher has started.

    Only the first one speaks inside: progress and warnings of the others would be the same. If the body raises on some
    of them, the exception leaves on the first that fails, whichever it is. The others end without a word, as they fail
    by the same error or because that one is gone.
    """
    if announced_processes() == 1:
        yield Processes()
        return
    starts = not dist.is_initialized()
    if starts:
        start_group()
    processes = Processes(dist.get_rank(), dist.get_world_size())
    failures = f"protrain {next(_runs)}: failures"
    try:
        with _silent() if processes.rank else nullcontext():
            yield processes
    except (Exception, KeyboardInterrupt) as error:
        if _fails_first(failures):
            raise
        raise SystemExit(128 + error.signal_number if isinstance(error, InterruptedRun) else 1) from None
    finally:
        if starts:
            with suppress(Exception):  # after an error others may be gone
                dist.destroy_process_group()


@contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings(), unheard():
        warnings.simplefilter("ignore")
        yield


def _fails_first(key: str) -> bool:
    """Whether no process has called this before, in the run that ``key`` stands for."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    try:
        return store.add(key, 1) == 1
    except dist.DistError:  # who has the store is gone: the launcher, or the first process where no launcher has one
        return dist.get_rank() == 0
