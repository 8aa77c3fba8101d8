"""What the comparisons of trainers and of clients ask for on their command lines, and say of where they ran."""

from __future__ import annotations

import argparse
import platform
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from protrain.cli.options import number
from protrain.cli.shapes import named
from protrain.hardware.memory import processor_name
from protrain.profiler.kept_profiles import version_of


class Sizes(NamedTuple):
    """The task of a comparison if its command names none. Without a GPU it is 2 rows of 64 tokens for ``tiny``."""

    model: str
    batch: int
    sequence: int
    steps: int
    warm_up: int


def add_sizes(parser: argparse.ArgumentParser, sizes: Sizes) -> None:
    """Add the options of a task's model, batch, steps and GPUs to ``parser``."""
    parser.add_argument(
        "--gpus", type=number(int, 1), default=1, help="of this machine, that train together (default: 1)"
    )
    parser.add_argument(
        "--model",
        type=named,
        default=None,
        help=f"a shape by name, or a folder, which goes before it (default: {sizes.model}; without a GPU: tiny)",
    )
    parser.add_argument("--layers", type=number(int, 1), default=None, help="blocks (default: those of the shape)")
    parser.add_argument(
        "--batch", type=number(int, 1), default=None, help=f"sequences a GPU (default: {sizes.batch}; without one: 2)"
    )
    parser.add_argument(
        "--sequence", type=number(int, 8), default=None, help=f"tokens (default: {sizes.sequence}; without a GPU: 64)"
    )
    parser.add_argument("--accumulation", type=number(int, 1), default=1, help="batches in a step (default: 1)")
    parser.add_argument("--steps", type=number(int, 3), default=sizes.steps, help="timed steps (default: %(default)s)")
    parser.add_argument(
        "--warm-up", type=number(int, 1), default=sizes.warm_up, help="before them (default: %(default)s)"
    )
    parser.add_argument("--device-memory", default=None, metavar="SIZE", help="of each GPU, for all")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run's time and folder to ``parser``."""
    parser.add_argument(
        "--time-limit",
        type=number(float, 1),
        default=3600.0,
        metavar="SECONDS",
        help="for the whole run (default: an hour)",
    )
    parser.add_argument(
        "--contestant-limit", type=number(float, 1), default=300.0, metavar="SECONDS", help="for each (default: 300)"
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="for the record")


def sizes_of(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """What the options of ``add_sizes`` say of a Task. ValueError where there are fewer GPUs."""
    on_gpu = torch.cuda.is_available()
    if on_gpu and args.gpus > max(1, torch.cuda.device_count()):
        raise ValueError(f"--gpus {args.gpus}: this machine has {torch.cuda.device_count()}")
    return {
        "model": args.model or (sizes.model if on_gpu else "tiny"),
        "layers": args.layers,
        "batch": args.batch or (sizes.batch if on_gpu else 2),
        "sequence": args.sequence or (sizes.sequence if on_gpu else 64),
        "accumulation": args.accumulation,
        "steps": args.steps,
        "warm_up": args.warm_up,
        "device_memory": args.device_memory,
        "gpus": args.gpus,
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that results depend on."""
    others = "triton", "transformers", "protrain"  # of which this one may run from a checkout
    found = {package: version_of(package) for package in others}
    return {"python": platform.python_version(), "torch": torch.__version__, **found}


def device_name(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' * (threads > 1)}"


def driver_of_gpu() -> str:
    """The version of the GPU's driver; "unknown" without a GPU."""
    return _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def commit_of_checkout() -> str:
    """The commit of the checkout that runs, with + if files were changed since; "unknown" outside of a checkout."""
    return _answer("git", "--no-optional-locks", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
