"""`protrain export`: its options. What it does is in ``export_run.py``, which imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protrain.cli.job import TrainJob
from protrain.cli.options import Parser, add_options, new_folder

_EXAMPLE = """example:
  protrain export runs/mine exported
  protrain export path/to/checkpoints exported --model path/to/model
"""


def add_command(commands: Any, summary: str) -> None:
    """Add `export` to the subparsers ``commands``, whose help has the line ``summary``."""
    parser: Parser = commands.add_parser(
        "export",
        help=summary,
        description="Write the weights of a checkpoint as a folder for from_pretrained.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="the folder of a run or of checkpoints")
    parser.add_argument("folder", metavar="FOLDER", type=new_folder, help="a new or empty folder for the model")
    parser.add_argument("--model", help="the model that was trained (default: that of the run)")
    add_options(
        parser,
        TrainJob,
        *("dtype", "lora", "merge"),
        dtype="the type of the weights (default: that of the run)",
        lora="the --lora of the training (default: that of the run)",
        merge="of a run with --lora: write the whole model with the adapter added",
    )
    parser.set_defaults(module="protrain.cli.export_run")
