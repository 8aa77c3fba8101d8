"""`protrain plan`: its options. What it does is in ``plan_run.py``, which imports torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import protrain
from protrain.cli.job import TrainJob
from protrain.cli.options import Parser, add_options, add_output_options, number, whole, writable_file
from protrain.cli.shapes import SHAPES

# Their names are read here, because the package that loads them needs torch.
_SHIPPED = sorted(file.stem for file in (Path(protrain.__file__).parent / "hardware" / "profiles").glob("*.json"))
_EXAMPLE = """example, for a machine that is elsewhere:
  protrain plan llama2-13b --hardware rtx3090 --batch 4 --out plan.json
  protrain plan llama2-13b --hardware rtx3090 --batch 4 --picture step.png
on four GPUs, each with a quarter of the states, and on two machines of eight:
  protrain plan llama2-13b --hardware h100 --batch 4 --gpus 4
  protrain plan llama2-34b --hardware a100 --batch 4 --gpus 8 --nodes 2
which of several machines to take, as names with GPUs and nodes:
  protrain plan llama2-13b --batch 4 --compare h100x1,h100x2,a100x4,a100x8x2
what more or less memory would do, and how deep such a model could be there:
  protrain plan llama2-13b --hardware rtx3090 --batch 4 --explain
  protrain plan llama2-13b --hardware rtx3090 --batch 4 --frontier
  protrain plan llama2-13b --hardware rtx3090 --batch 4 --max-model
"""


def add_command(commands: Any, summary: str) -> None:
    """Add `plan` to the subparsers ``commands``, whose help has the line ``summary``."""
    parser: Parser = commands.add_parser(
        "plan",
        help=summary,
        usage="%(prog)s MODEL [--hardware NAME] [--batch N] [OPTION ...]",
        description="Profile a model and search the plan for a machine.",
        epilog=_EXAMPLE,
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"a folder with a Hugging Face config.json, or one of {', '.join(SHAPES)}"
    )
    add_options(
        parser,
        TrainJob,
        *("batch", "sequence", "data", "accumulation", "dtype", "moment_dtype", "lora", "load_in_4bit", "freeze"),
        *("compile", "chunked_loss", "step_during_backward"),
        sequence="tokens in a sequence (default: of the model)",
        data="the data that is to be trained on: if it is rows and no text, the plan has room for the attention mask "
        "that packed rows need",
        accumulation="batches in a step, on each GPU (default: 1)",
        step_during_backward="plan for updates inside backward, which take less host memory and exclude clipping",
    )
    _add_machine_options(parser)
    shown = parser.add_argument_group("what is shown")
    what = shown.add_mutually_exclusive_group()
    what.add_argument(
        "--frontier",
        action="store_true",
        help="not one plan, but the fastest under each of a dozen limits on device memory",
    )
    what.add_argument(
        "--max-model",
        action="store_true",
        help="not a plan for MODEL, but the most layers of its width that fit",
    )
    what.add_argument(
        "--compare",
        metavar="MACHINES",
        help="not one plan, but a line for each machine: whether MODEL fits, how fast it is, and what limits it. "
        "Machines are names with GPUs, and nodes if several: h100x2,a100x8x2",
    )
    what.add_argument(
        "--explain",
        action="store_true",
        help="also what each number of the plan, and more memory, would change, and what is assumed of the machine",
    )
    shown.add_argument(
        "--picture",
        metavar="FILE",
        type=writable_file,
        help="also a picture of one step, or of the frontier: .png, .svg or .pdf",
    )
    add_output_options(parser)
    parser.set_defaults(module="protrain.cli.plan_run")


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``protrain.cli.plan_machine.machine_of`` reads."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--hardware",
        metavar="FILE|NAME",
        help=f"the file that `protrain calibrate --out` wrote, or one of {', '.join(_SHIPPED)} (default: this machine)",
    )
    on_device = "cuda or cpu (default: that of --hardware, or cuda if there is a GPU)"
    add_options(machine, TrainJob, "device", device=on_device)
    machine.add_argument(
        "--gpus",
        type=whole(1),
        metavar="N",
        default=1,
        help="GPUs of the machine that train together and share its host memory (default: 1)",
    )
    machine.add_argument(
        "--nodes", type=whole(1), metavar="M", default=1, help="equal machines with --gpus GPUs each (default: 1)"
    )
    machine.add_argument(
        "--network-gbps",
        type=number(1e-3),
        metavar="GB/s",
        help="gigabytes a second that the GPUs of a node together receive from other nodes (default: what is usual for "
        "the GPU)",
    )
    add_options(machine, TrainJob, "device_memory", "host_memory")
