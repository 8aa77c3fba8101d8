"""`protrain plan`: what would be done with a model on a machine, without doing it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

import protrain
from protrain.cli.job import DTYPES
from protrain.cli.models import check_sequence, load_model
from protrain.cli.options import Parser, add_memory_options, add_output_options, emit, whole
from protrain.cli.prepare import adamw, choose_device, choose_dtype
from protrain.cli.shapes import SHAPES
from protrain.hardware import HardwareProfile, detect, load
from protrain.progress import Progress
from protrain.quantities import parse_bytes

_EXAMPLE = """example, for a machine that is elsewhere:
  protrain plan llama2-13b --hardware rtx3090 --batch 4 --out plan.json
"""


def add_command(commands: Any) -> None:
    """Add `plan` to the subparsers ``commands``."""
    parser: Parser = commands.add_parser(
        "plan",
        help="show the plan for a model",
        description="Profile a model and search the plan for a machine.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--batch", type=whole(1), default=8, help="sequences in a batch (default: 8)")
    parser.add_argument("--sequence", type=whole(2), default=None, help="tokens in a sequence (default: of the model)")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="of weights (default: bfloat16 on a GPU)")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--hardware", metavar="FILE|NAME", default=None, help="a profile of `protrain calibrate`, or h100, h200, ..."
    )
    machine.add_argument("--device", default=None, help="cuda or cpu (default: that of --hardware, or cuda if any)")
    add_memory_options(machine)
    add_output_options(parser)
    parser.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> None:
    """Run `protrain plan`."""
    hardware = _hardware(args)
    loaded = load_model(args.model)
    sequence = args.sequence or loaded.sequence
    check_sequence(loaded, sequence)
    ids = torch.zeros(args.batch, sequence, dtype=torch.int64)
    device = torch.device(hardware.device_type)
    say = Progress(enabled=True)
    with say.stage("profiling the model"):
        profile = protrain.profile(
            loaded.model,
            {"input_ids": ids, "labels": ids},
            optimizer=adamw(loaded.model, loaded.learning_rate, weight_decay=0.0),
            # Another machine's times cannot be measured here: they follow from counted operations.
            device=device if args.hardware is None else torch.device("meta"),
            dtype=choose_dtype(args.dtype, device),
        )
    with say.stage("planning"):
        plan = protrain.search(profile, hardware)
    sections = [("model", profile), ("machine", hardware), ("plan", plan)]
    emit(plan, args, "\n\n".join(f"{title}\n{record.table()}" for title, record in sections))


def _hardware(args: argparse.Namespace) -> HardwareProfile:
    memory = {name: getattr(args, name) for name in ("device_memory", "host_memory") if hasattr(args, name)}
    if args.hardware is None:
        return detect(choose_device(args.device), **memory)
    hardware = load(args.hardware)
    if args.device is not None and torch.device(args.device).type != hardware.device_type:
        raise ValueError(f"--device {args.device} contradicts --hardware {args.hardware}, a {hardware.device_type}")
    limits: dict[str, Any] = {
        name.replace("memory", "bytes"): parse_bytes(value, name=name) for name, value in memory.items()
    }
    return replace(hardware, **limits)
