"""The device on which a command runs, and the machine that it belongs to."""

from __future__ import annotations

import argparse

import torch

from protrain.cli.defaults import device_type_of
from protrain.distributed.processes import announced_processes, local_processes, local_rank
from protrain.hardware.detection import detect
from protrain.hardware.profile import HardwareProfile


def this_machine(args: argparse.Namespace) -> HardwareProfile:
    """The profile of the machine on which `protrain plan` runs, with the device and the memory that ``args`` say.

    Raises:
        ValueError: It has no GPU. To run a large model on a CPU for its profile takes hours, which only --device cpu
            asks for.
    """
    if args.device is None and not torch.cuda.is_available():
        raise ValueError(
            "this machine has no GPU to plan for: name another with --hardware, for example --hardware rtx4090, or "
            "give --device cpu for a simulated device"
        )
    return detect(choose_device(args.device), device_memory=args.device_memory, host_memory=args.host_memory)


def own_device(name: str | None) -> torch.device:
    """The device of this process, of those that ``name`` means: where there are several, each has a GPU of its own.

    Raises:
        ValueError: ``name`` is no device, or there are too few of that kind.
    """
    device = choose_device(name)
    processes = local_processes()
    if announced_processes() == 1 or device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(f"--device {name} is one GPU, and {processes} processes run here: give --device cuda")
    if processes > torch.cuda.device_count():
        raise ValueError(f"--gpus {processes}: this machine has {torch.cuda.device_count()} CUDA devices")
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


def choose_device(name: str | None) -> torch.device:
    """The device that ``name`` means. If ``name`` is None, it is a GPU if there is one.

    Raises:
        ValueError: ``name`` is no device, or there is none of that kind.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device_type_of(name)  # refuses what is no such device
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no CUDA device on this machine; give --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device
