"""Which device a process trains on. Each rank has a GPU of its own; without GPUs the CPU plays the device of each."""

from __future__ import annotations

import os
import socket

import torch

from protrain.distributed.joining import announced_processes, local_rank
from protrain.distributed.ranks import Ranks

_AMPERE = 8  # the major number of its compute capability


def own_device(device: torch.device | str | None = None) -> torch.device:
    """The device that ``device`` means in this process. A GPU has its index.

    No CUDA context is made, as one takes hundreds of megabytes of a GPU.

    Args:
        device: "cuda", "cuda:1" or "cpu". None means a GPU where there is one.

    Raises:
        ValueError: it is neither a GPU nor the CPU, or there is no such GPU.
    """
    try:
        found = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a CUDA GPU or the CPU, not {device!r}") from None
    if found.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be a CUDA GPU or the CPU, not {found}")
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise ValueError(
            f"device='{found}', but there is no CUDA GPU here: pass device='cpu', or install a CUDA build of torch"
        )
    if found.index is None:
        return torch.device("cuda", _own_gpu())
    if found.index >= torch.cuda.device_count():
        raise ValueError(
            f"device='{found}', but {_visible()}, counted from 0: pass device='cuda' for the GPU of this process"
        )
    return found


def _own_gpu() -> int:
    """The index of the GPU of this process, among those that it sees.

    Launchers differ: torchrun shows all GPUs of the machine to every process and tells it its number, and others, as
    srun --gpus-per-task=1 and Ray, show each process its own GPU alone. A script may have chosen with
    torch.cuda.set_device. If it has chosen GPU 0, nothing tells that from no choice.
    """
    count = torch.cuda.device_count()
    if count == 1:
        return 0
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if chosen or announced_processes() == 1:
        return chosen
    if local_rank() >= count:
        raise ValueError(
            f"LOCAL_RANK is {local_rank()}, but {_visible()}: start as many processes on each machine as it has GPUs, "
            f"as torchrun --nproc-per-node {count} and protrain train --gpus {count} do, or choose the GPU of this "
            "process with torch.cuda.set_device"
        )
    return local_rank()


def _visible() -> str:
    """How many GPUs this process sees, and why, in words."""
    count, variable = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "is not set" if variable is None else f"is {variable!r}"
    return f"this process sees {count} GPU{'s' * (count != 1)} (CUDA_VISIBLE_DEVICES {why})"


def has_bf16(device: torch.device) -> bool:
    """Whether ``device`` computes in bf16 as it does in fp16. On NVIDIA's cards before Ampere torch emulates bf16."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return not is_nvidia or torch.cuda.get_device_properties(device).major >= _AMPERE


def refuse_shared_gpu(ranks: Ranks, device: torch.device) -> None:
    """Raise a ValueError on every rank if two ranks are on one GPU. Each calls this with the device that it takes.

    Without this, NCCL would refuse it late, or both ranks would run out of memory.
    """
    has_gpu = device.type == "cuda"
    own = (f"GPU-{torch.cuda.get_device_properties(device).uuid}", socket.gethostname()) if has_gpu else None
    gpus = ranks.all_values(own, "the GPU of each rank")
    for rank, gpu in enumerate(gpus):
        if gpu is not None and gpu in gpus[:rank]:
            raise ValueError(
                f"ranks {gpus.index(gpu)} and {rank} are on the same GPU, {gpu[0]} of {gpu[1]}, and each needs its "
                "own: start as many processes on each machine as it has GPUs, as torchrun --nproc-per-node does, and "
                "pass device='cuda', or call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) in each of them"
            )
