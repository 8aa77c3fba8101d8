"""How many processes train: one, until chunks are sharded over several."""

from __future__ import annotations

import os

import torch.distributed as dist


def refuse_several_processes(error: type[Exception]) -> None:
    """Raise ``error`` in each of several processes, where every one would train a model of its own."""
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
    """The number of processes in the environment, as torchrun and its like set it."""
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 1
