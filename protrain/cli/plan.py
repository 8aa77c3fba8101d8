"""`protrain plan`: its options. What it does is in ``plan_run.py``, which imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from protrain.cli.lora import add_training_options
from protrain.cli.options import (
    DTYPES,
    MOMENT_DTYPES,
    Parser,
    add_compile_option,
    add_loss_option,
    add_memory_options,
    add_output_options,
    add_sequence_option,
    imported_late,
    number,
    whole,
    writable_file,
)
from protrain.cli.shapes import SHAPES

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
    parser.add_argument(
        "--batch", type=whole(1), metavar="N", default=8, help="sequences in a batch, on each GPU (default: 8)"
    )
    add_sequence_option(parser, default="of the model")
    parser.add_argument(
        "--data",
        metavar="PATH",
        default=None,
        help="the data of the training: rows of it are packed, for which attention needs a mask (default: text)",
    )
    parser.add_argument("--accumulation", type=whole(1), metavar="N", default=1, help="batches in a step (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="of weights (default: bfloat16 on a GPU)")
    parser.add_argument(
        "--moment-dtype",
        choices=MOMENT_DTYPES,
        default="float32",
        help="of Adam's two moments; bfloat16 takes 4 bytes a parameter less (default: float32)",
    )
    add_training_options(parser)
    parser.set_defaults(lora=None, load_in_4bit=False, freeze=[])
    add_compile_option(parser)
    add_loss_option(parser)
    parser.add_argument(
        "--step-during-backward", action="store_true", default=False, help="plan for updates inside backward"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--frontier", action="store_true", default=False, help="the fastest plans under a dozen limits on device memory"
    )
    what.add_argument(
        "--max-model", action="store_true", default=False, help="the deepest model of the width of MODEL that fits"
    )
    what.add_argument(
        "--compare",
        metavar="MACHINES",
        default=None,
        help="for each of NAMExGPUS[xNODES],... a line: whether MODEL fits, how fast it is, and what limits it",
    )
    what.add_argument(
        "--explain",
        action="store_true",
        default=False,
        help="also say what every integer of the plan and more memory would change, and what is assumed of the machine",
    )
    _add_machine_options(parser)
    add_output_options(parser)
    parser.add_argument(
        "--picture",
        metavar="FILE",
        type=writable_file,
        default=None,
        help="draw one step, or the frontier: .png, .svg or .pdf",
    )
    parser.set_defaults(run=imported_late("protrain.cli.plan_run"))


def _add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`protrain.cli.plan_machine.machine_of` reads."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--hardware",
        metavar="FILE|NAME",
        default=None,
        help="a profile of `protrain calibrate`, or a shipped one by its name, like h100; a wrong name lists them",
    )
    machine.add_argument("--device", default=None, help="cuda or cpu (default: that of --hardware, or cuda if any)")
    machine.add_argument(
        "--gpus",
        type=whole(1),
        metavar="N",
        default=1,
        help="GPUs of the machine that train together and share its host memory (default: 1)",
    )
    machine.add_argument(
        "--nodes", type=whole(1), metavar="M", default=1, help="equal machines with --gpus each (default: 1)"
    )
    machine.add_argument(
        "--network-gbps",
        type=number(1e-3),
        metavar="GB/s",
        default=None,
        help="what the GPUs of a node together receive from other nodes (default: as assumed for the name)",
    )
    add_memory_options(machine)
