"""Refuses to train in several processes, until chunks are sharded over them."""

from __future__ import annotations

import os

import torch.distributed as dist


def refuse_several_processes(error: type[Exception]) -> None:
    """Raise ``error`` if this is one of several processes, because each would train a model of its own."""
    initialized = dist.is_available() and dist.is_initialized()
    count = dist.get_world_size() if initialized else _announced()
    if count > 1:
        where = "of the process group" if initialized else "that WORLD_SIZE announces"
        raise error(
            f"this is one of {count} processes {where}, and ProTrain trains in one process so far: each would train a "
            "model of its own, and DistributedDataParallel, fully_shard or a strategy of Lightning's around it would "
            "not change that. Start one process (python in place of torchrun, devices=1)"
        )


def _announced() -> int:
    """The number of processes that the environment announces, as torchrun and other launchers set it."""
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 1
