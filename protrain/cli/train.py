"""`protrain train`: its options. What it does is in ``train_run.py``, which imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from protrain.cli import job as jobs
from protrain.cli.job import RANGES, TrainJob
from protrain.cli.loggers import LOGGERS
from protrain.cli.lora import add_training_options
from protrain.cli.options import (
    Parser,
    add_forward_options,
    add_gpus_option,
    add_memory_options,
    add_output_options,
    add_sequence_option,
    add_type_options,
    number,
    whole,
    writable_file,
    writable_folder,
)
from protrain.cli.shapes import SHAPES
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
    what.add_argument("--model", metavar="MODEL", help=f"a Hugging Face folder, or one of {', '.join(SHAPES)}")
    what.add_argument(
        "--from-scratch",
        action="store_true",
        help="begin with random weights, so that a --model folder needs only its config.json and perhaps a tokenizer",
    )
    what.add_argument(
        "--data",
        metavar="PATH",
        help="text, JSON lines or list, CSV, Parquet, a folder of one of them, or one that save_to_disk of datasets "
        "wrote (default: the sources of Python's library)",
    )
    what.add_argument(
        "--column",
        metavar="NAME",
        help="the column of --data with text or messages (default: the first that there is of messages, conversations, "
        "prompt with completion, instruction with output, and text)",
    )
    what.add_argument("--chat-template", metavar="FILE", help="a Jinja template (default: that of the tokenizer)")
    what.add_argument(
        "--loss-on",
        choices=jobs.LOSS_ON,
        help="whether the loss counts only answers, in conversations and after prompts, or all tokens (default: "
        "answers)",
    )
    what.add_argument(
        "--folder", type=writable_folder, metavar="FOLDER", help="where the run is kept (default: runs/MODEL-TIME)"
    )
    what.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --folder with its options, as --folder without --model does too. More --steps train "
        "it longer. Of other options only those may be given that never change the weights: "
        + ", ".join(sorted(map(jobs.option, jobs.MAY_DIFFER))),
    )
    _add_number(what, "seed", "the seed of random weights, batches and the sample")
    add_training_options(what)

    steps = parser.add_argument_group("training")
    _add_number(steps, "batch", "sequences in a batch, on each GPU")
    add_sequence_option(steps, default="256 for tiny, else 1024")
    _add_number(
        steps,
        "accumulation",
        "batches in a step, on each GPU; resumed on another number of GPUs, a run keeps their number on all together",
    )
    _add_number(steps, "steps", "optimizer steps")
    _add_number(
        steps,
        "learning_rate",
        "the peak learning rate (default: 2e-4 with --lora, 3e-5 for other weights of a folder, 3e-4 for random ones, "
        "and 3e-3 for tiny)",
    )
    _add_number(
        steps,
        "warmup",
        "steps in which the learning rate rises to its peak, before it falls as a cosine (default: 20, or a fifth of "
        "--steps if that is less)",
    )
    _add_number(steps, "min_learning_rate", "the learning rate of the last step, as a share of the peak")
    _add_number(steps, "weight_decay", "the weight decay of matrices; biases and norms have none")
    _add_number(steps, "clip", "the largest norm of the gradient; a larger one is scaled down; 0: no clipping")
    add_type_options(steps)
    add_forward_options(steps)

    placement = parser.add_argument_group(
        "where it runs",
        wrapped("These change no weights, on one kind of device and with as many threads, and batches in a step.", 78),
    )
    add_gpus_option(placement, "train")
    placement.add_argument("--device", help="cuda or cpu (default: cuda if there is a GPU)")
    add_memory_options(placement)
    placement.add_argument(
        "--plan", metavar="FILE", help="use the plan that `protrain plan --out FILE` wrote, and search none"
    )
    placement.add_argument(
        "--step-during-backward",
        action="store_true",
        help="update each part of the model inside backward, which takes less host memory; needs --clip 0",
    )
    _add_number(placement, "threads", "CPU threads (default: torch's choice)")

    keeping = parser.add_argument_group("keeping and reporting")
    _add_number(keeping, "checkpoint_every", "steps between checkpoints; 0: none")
    _add_number(keeping, "keep", "the number of newest checkpoints to keep")
    keeping.add_argument(
        "--no-model", dest="save_model", action="store_false", help="do not write the trained model at the end"
    )
    keeping.add_argument(
        "--merge",
        action="store_true",
        help="with --lora: write the whole model with the adapter added, not the adapter alone",
    )
    _add_number(keeping, "held_out", "the share of the text or rows that is kept for evaluation")
    _add_number(keeping, "evaluate_every", "steps between evaluations; 0: only at the end")
    _add_number(keeping, "evaluation_batches", "batches of an evaluation")
    _add_number(keeping, "sample_tokens", "tokens to generate at the end; 0: none")
    keeping.add_argument(
        "--logger", choices=LOGGERS, help="log every step there as well; a resumed run continues its curve"
    )
    _add_number(keeping, "log_every", "steps between lines of progress where the output is no terminal")
    keeping.add_argument(
        "--trace",
        type=writable_file,
        metavar="FILE",
        help="write a trace of two steps, measured beside predicted, for ui.perfetto.dev; needs 5 steps",
    )
    add_output_options(parser)
    parser.set_defaults(folder=None, resume=False, gpus=None, trace=None, json=False, out=None)
    parser.set_defaults(module="protrain.cli.train_run")


def _add_number(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    """Add the option for the number ``name`` of a job, with its limits and, unless it is None, its default."""
    least, most = RANGES[name]
    kind = number(least, most) if isinstance(least, float) else whole(least, most)
    default = getattr(TrainJob, name, None)
    shown = "" if default is None else f" (default: {default:g})"
    names = [jobs.option(name)] + ["--lr"] * (name == "learning_rate")
    metavar = "X" if isinstance(least, float) else "N"
    group.add_argument(*names, type=kind, metavar=metavar, help=f"{text}{shown}")
