"""`protrain convert`: checkpoints to and from the format of torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from protrain.cli.options import Parser
from protrain.cli.run_files import saves_of
from protrain.common.progress import Progress

_EXAMPLE = """example:
  protrain convert runs/mine dcp                # its newest checkpoint
  protrain convert dcp runs/other/checkpoints   # and back
"""


def add_command(commands: Any, summary: str) -> None:
    """Add `convert` to the subparsers ``commands``, whose help has the line ``summary``."""
    parser: Parser = commands.add_parser(
        "convert",
        help=summary,
        description="Convert a checkpoint, of any number of GPUs, to torch.distributed.checkpoint, or back.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a run, or a checkpoint of either format")
    parser.add_argument("target", metavar="TARGET", type=Path, help="where to write it in the other format")
    parser.set_defaults(module=__name__)


def run(args: argparse.Namespace) -> None:
    """Run `protrain convert`."""
    from protrain.checkpoint.dcp import convert  # no other command should wait for torch's checkpoints to be imported

    with Progress(enabled=True).stage(f"converting {args.source}"):
        written = convert(saves_of(args.source), args.target)
    print(written)
