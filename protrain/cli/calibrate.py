"""`protrain calibrate`: its options. What it does is in ``calibrate_run.py``, which imports torch."""

from __future__ import annotations

from typing import Any

from protrain.cli.job import TrainJob
from protrain.cli.options import Parser, add_gpus_option, add_options, add_output_options, number

_EXAMPLE = """example:
  protrain calibrate --out machine.json
  protrain plan llama2-13b --hardware machine.json

on four GPUs at once, with what they gather and exchange:
  protrain calibrate --gpus 4
"""
_DESCRIPTION = """Measure what the machine's device, link and host can do, alone and together, in under a minute.

Close other programs first. Training and planning on this machine then use the profile, which is kept in \
$PROTRAIN_CACHE, $XDG_CACHE_HOME/protrain or ~/.cache/protrain."""


def add_command(commands: Any, summary: str) -> None:
    """Add `calibrate` to the subparsers ``commands``, whose help has the line ``summary``."""
    parser: Parser = commands.add_parser("calibrate", help=summary, description=_DESCRIPTION, epilog=_EXAMPLE)
    add_gpus_option(parser, "measure")
    add_options(parser, TrainJob, "device")
    parser.add_argument(
        "--seconds",
        type=number(0, 600, open_ended=True),
        metavar="X",
        help="how long to measure; less also means smaller sizes and rougher figures (default: 30)",
    )
    parser.add_argument(
        "--repeat-check", action="store_true", help="measure twice and print the figures that differ by more than 5%%"
    )
    add_output_options(parser)
    parser.set_defaults(module="protrain.cli.calibrate_run")
