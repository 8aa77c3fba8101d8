"""What `protrain calibrate` does: it measures this machine."""

from __future__ import annotations

import argparse

import torch

import protrain
from protrain.cli.launch import start_ranks, together
from protrain.cli.options import emit
from protrain.common.progress import print_line, stage
from protrain.distributed.devices import own_device
from protrain.distributed.joining import announced_processes
from protrain.hardware.cache import Machine, cached
from protrain.hardware.calibration import FULL_SECONDS, report


def run(args: argparse.Namespace) -> None:
    """Run `protrain calibrate`, in as many processes as GPUs are to be measured."""
    start_ranks(args.gpus, args.words)
    with together() as rank:
        _calibrate(args, speaks=rank == 0)


def _calibrate(args: argparse.Namespace, *, speaks: bool) -> None:
    if args.device is None and not torch.cuda.is_available():
        raise ValueError("this machine has no GPU to measure: give --device cpu for a simulated device")
    device, seconds = own_device(args.device), args.seconds or FULL_SECONDS
    kept = cached(device)
    # Unless it is the first, a trial must not spoil the plans of a full calibration.
    save = kept is None or kept.world_size != announced_processes() or seconds >= FULL_SECONDS
    with stage("measuring") as progress:
        try:
            hardware = protrain.calibrate(device, seconds=seconds, save=save, progress=progress)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"close what else uses the GPU, as nvidia-smi or rocm-smi lists it: {error}") from None
    if not speaks:
        return
    emit(hardware, args, report(hardware))
    if not save:
        print_line(
            "the profile was not kept, because there is one already, and in less than "
            f"{FULL_SECONDS:.0f} s figures are rougher"
        )
    elif cached(device) == hardware:  # of a cache that cannot be written a warning has told
        print_line(f"kept in {Machine.of(device).path}, for plans and runs with --device {device.type} alone")
