"""What the commands do, other than `protrain plan`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

import torch

import protrain
from protrain.checkpoint.export import export_save
from protrain.checkpoint.manifest import STATES, find_save
from protrain.cli.launch import start_ranks, together
from protrain.cli.models import choose_trained, read_architecture
from protrain.cli.options import emit, need
from protrain.common.cache import on_disk
from protrain.common.parameters import DTYPES
from protrain.common.progress import print_line, stage
from protrain.distributed.devices import own_device
from protrain.distributed.joining import announced_processes
from protrain.hardware.cache import Machine, cached
from protrain.hardware.calibration import FULL_SECONDS, report


def calibrate(args: argparse.Namespace) -> None:
    """Run `protrain calibrate`, in as many processes as GPUs are to be measured."""
    start_ranks(args.gpus, args.words)
    with together() as rank:
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
                raise MemoryError(
                    f"close what else uses the GPU, as nvidia-smi or rocm-smi lists it: {error}"
                ) from None
        if rank > 0:
            return
        emit(hardware, args, report(hardware))
        if not save:
            print_line(
                "the profile was not kept, because there is one already, and in less than "
                f"{FULL_SECONDS:.0f} s figures are rougher"
            )
        elif cached(device) == hardware:  # of a cache that cannot be written a warning has told
            print_line(f"kept in {Machine.of(device).path}, for plans and runs with --device {device.type} alone")


def train(args: argparse.Namespace) -> None:
    """Run `protrain train`, in as many processes as GPUs train.

    Raises:
        ValueError: an option or the data is wrong, or a package is missing.
    """
    need("trl", "`protrain train`", extra="train")
    from protrain.cli import train as on_trl

    warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
    options = on_trl.parse(args.words[1:])
    start_ranks(options.data.gpus, args.words)
    with together():
        on_trl.train(options)


def export(args: argparse.Namespace) -> None:
    """Run `protrain export`."""
    save = find_save(_saves_of(args.checkpoint))
    architecture = choose_trained(read_architecture(on_disk(args.model, weights=False)), args.lora, ())
    folder = architecture.folder
    tokenizer = None
    if folder is not None and any(folder.glob("tokenizer*")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with stage(f"writing {args.folder}"):
        export_save(
            save,
            architecture.model,
            args.folder,
            dtype=DTYPES[args.dtype] if args.dtype else None,
            tokenizer=tokenizer,
        )


def convert(args: argparse.Namespace) -> None:
    """Run `protrain convert`."""
    from protrain.checkpoint import dcp  # no other command should wait for torch's checkpoints to be imported

    with stage(f"converting {args.source}"):
        written = dcp.convert(_saves_of(args.source), args.target)
    print(written)


def _saves_of(folder: Path) -> Path:
    """The saves in ``folder``: its own, those of a Trainer's checkpoint, or of the newest one of a Trainer's run."""
    newest = sorted(folder.glob(f"checkpoint-*/{STATES}"), key=lambda path: int(path.parent.name.rpartition("-")[2]))
    return next((each for each in (folder / STATES, *reversed(newest)) if each.is_dir()), folder)


def bench(args: argparse.Namespace) -> None:
    """Become the benchmark that `protrain bench` names, which has options and an exit status of its own.

    The benchmarks live in the repository's folder ``bench``, beside the results that they produced. The installed
    package does not contain them.

    Raises:
        ValueError: this is no checkout.
    """
    folder = Path("bench", args.benchmark)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} here: run this in a checkout of the repository")
    words = ["pytest", str(folder)] if args.benchmark == "kernels" else [f"bench.{args.benchmark}"]
    os.execv(sys.executable, [sys.executable, "-m", *words, *args.options])
