"""`protrain calibrate`: measure this machine."""

from __future__ import annotations

import argparse
from typing import Any

import protrain
from protrain.cli.options import Parser, add_output_options, emit
from protrain.cli.prepare import choose_device
from protrain.progress import Progress

_EXAMPLE = """example:
  protrain calibrate --out machine.json
  protrain plan llama2-13b --hardware machine.json
"""


def add_command(commands: Any) -> None:
    """Add `calibrate` to the subparsers ``commands``."""
    parser: Parser = commands.add_parser(
        "calibrate",
        help="measure this machine",
        description="Measure what the machine's device, link and host can do.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda when there is one)")
    add_output_options(parser)
    parser.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> None:
    """Run `protrain calibrate`."""
    device = choose_device(args.device)
    with Progress(enabled=True).stage("measuring"):
        hardware = protrain.calibrate(device=device)
    emit(hardware, args, hardware.table())
