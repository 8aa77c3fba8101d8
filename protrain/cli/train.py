"""`protrain train`: its options. What it does is in ``train_run.py``, which imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from protrain.cli.job import MAY_DIFFER, TrainJob
from protrain.cli.options import (
    Parser,
    add_gpus_option,
    add_options,
    add_output_options,
    writable_file,
    writable_folder,
)
from protrain.common.tables import wrapped

_EXAMPLE = """example, about two minutes on two CPU cores:
  protrain train --model tiny --device cpu --device-memory 60MiB \\
    --folder runs/tiny
go on after Ctrl-C or a crash, to the same bits, or train longer:
  protrain train --resume --folder runs/tiny
  protrain train --resume --folder runs/tiny --steps 800
on conversations, where each line of the file is
{"messages": [{"role": "user", "content": ...}, ...]}:
  protrain train --model path/to/model --data chat.jsonl
a model of your own, from its config.json, with random weights:
  protrain train --model path/to/config --from-scratch --data path/to/text
an adapter for a model of your own, whose weights are held in 4 bits:
  protrain train --model path/to/model --data path/to/text --lora r=16 \\
    --load-in-4bit
on four GPUs, each of which runs one of the four batches of a step:
  protrain train --model llama-1b --gpus 4
"""


def add_command(commands: Any, summary: str) -> None:
    """Add `train` to the subparsers ``commands``, whose help has the line ``summary``."""
    parser: Parser = commands.add_parser(
        "train",
        help=summary,
        usage="%(prog)s --model MODEL [--data PATH] [--folder FOLDER] [OPTION ...]\n"
        "       %(prog)s --resume --folder FOLDER [--steps N] [OPTION ...]",
        description="Train a causal language model on text, or on rows of data such as conversations.",
        epilog=_EXAMPLE,
        argument_default=argparse.SUPPRESS,  # an option that was not given leaves no attribute
    )
    what = parser.add_argument_group("model and data")
    what.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options, like 'learning-rate: 1e-4' and 'compile: false'; options given here win",
    )
    add_options(what, TrainJob, "model", "from_scratch", "data", "column", "chat_template", "loss_on")
    what.add_argument(
        "--folder", type=writable_folder, metavar="FOLDER", help="where the run is kept (default: runs/MODEL-TIME)"
    )
    what.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --folder with its options, as --folder without --model does too. More --steps train "
        "it longer. Of other options only those may be given that never change the weights: "
        + ", ".join(sorted(MAY_DIFFER.values())),
    )
    add_options(what, TrainJob, "seed", "lora", "load_in_4bit", "freeze")

    steps = parser.add_argument_group("training")
    add_options(steps, TrainJob, "batch", "sequence", "accumulation", "steps", "learning_rate", "warmup")
    add_options(steps, TrainJob, "min_learning_rate", "weight_decay", "clip")
    add_options(steps, TrainJob, "dtype", "moment_dtype", "compile", "chunked_loss")

    placement = parser.add_argument_group(
        "where it runs",
        wrapped("These change no weights, on one kind of device and with as many threads, and batches in a step.", 78),
    )
    add_gpus_option(placement, "train")
    add_options(
        placement, TrainJob, "device", "device_memory", "host_memory", "plan", "step_during_backward", "threads"
    )

    keeping = parser.add_argument_group("keeping and reporting")
    add_options(keeping, TrainJob, "checkpoint_every", "keep", "save_model", "merge", "held_out")
    add_options(keeping, TrainJob, "evaluate_every", "evaluation_batches", "sample_tokens", "logger", "log_every")
    keeping.add_argument(
        "--trace",
        type=writable_file,
        metavar="FILE",
        help="write a trace of two steps, measured beside predicted, for ui.perfetto.dev; needs 5 steps",
    )
    add_output_options(parser)
    parser.set_defaults(folder=None, resume=False, gpus=None, trace=None, json=False, out=None)
    parser.set_defaults(module="protrain.cli.train_run")
