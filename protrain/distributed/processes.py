"""How many processes there are, and which of them this is, as a process group or a launcher says."""

from __future__ import annotations

import os

import torch.distributed as dist


def announced_processes() -> int:
    """The number of processes that train: of the default group, or that the environment announces (torchrun)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 1


def local_rank() -> int:
    """The number of this process among those of its node, which is the number of its GPU."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdecimal() else 0


def local_processes() -> int:
    """The number of processes on this node, which share its host memory and its cores."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() else announced_processes()
