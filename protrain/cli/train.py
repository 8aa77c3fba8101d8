"""`protrain train`: its options. What it does is in ``train_run.py``, which imports torch."""

from __future__ import annotations

import argparse
from typing import Any

from protrain.cli import job as jobs
from protrain.cli.job import RANGES, TrainJob
from protrain.cli.loggers import LOGGERS
from protrain.cli.lora import add_training_options
from protrain.cli.options import (
    DTYPES,
    MOMENT_DTYPES,
    Parser,
    add_compile_option,
    add_gpus_option,
    add_loss_option,
    add_memory_options,
    add_output_options,
    add_sequence_option,
    imported_late,
    number,
    whole,
    writable_file,
    writable_folder,
)
from protrain.cli.shapes import SHAPES

_EXAMPLE = """example, about two minutes on two CPU cores:
  protrain train --model tiny --device cpu --device-memory 60MiB \\
    --folder runs/tiny
goes on after Ctrl-C or a crash, to the same bits, and longer than it was to be:
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
    )
    what = parser.add_argument_group("what")
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
        help="text, JSON lines or list, CSV, Parquet, a folder of one of them, or one that datasets saved to disk "
        "(default: the sources of Python's library)",
    )
    what.add_argument(
        "--column",
        metavar="NAME",
        help="the column of --data with text or messages (default: messages, conversations, prompt with completion, "
        "instruction with output, or text)",
    )
    what.add_argument("--chat-template", metavar="FILE", help="a Jinja template (default: that of the tokenizer)")
    what.add_argument(
        "--loss-on",
        choices=jobs.LOSS_ON,
        help="the tokens of conversations and prompts that the loss counts (default: answers)",
    )
    what.add_argument(
        "--folder", type=writable_folder, metavar="FOLDER", help="where the run is kept (default: runs/MODEL-TIME)"
    )
    what.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="continue the run in --folder, with its options, which --folder without --model does too; more --steps "
        "continue it longer, and else only what never changes the weights may differ: "
        + ", ".join(sorted(map(jobs.option, jobs.MAY_DIFFER))),
    )
    _add_number(what, "seed", "the seed of weights, batches and sample")
    add_training_options(what)

    steps = parser.add_argument_group("steps")
    _add_number(steps, "batch", "sequences in a batch")
    add_sequence_option(steps, default="256 for tiny, else 1024")
    _add_number(steps, "accumulation", "batches in a step, on each GPU; a resumed run keeps the batches of all GPUs")
    _add_number(
        steps, "steps", "optimizer steps; a finished run goes on with more, at the rates of a run of that length"
    )
    _add_number(steps, "learning_rate", "the peak learning rate (default: depends on the model)")
    _add_number(steps, "warmup", "steps of linear warm-up, then a cosine (default: 20, at most a fifth)")
    _add_number(steps, "min_learning_rate", "the last learning rate, as a share of the peak")
    _add_number(steps, "weight_decay", "the weight decay of matrices")
    _add_number(steps, "clip", "the largest gradient norm; 0: no clipping")
    steps.add_argument(
        "--dtype", choices=DTYPES, help="the type of weights (default: bfloat16 on a GPU, float32 on a CPU)"
    )
    steps.add_argument(
        "--moment-dtype",
        choices=MOMENT_DTYPES,
        help="the type of Adam's two moments; bfloat16 takes 4 bytes a parameter less (default: float32)",
    )
    add_compile_option(steps)
    add_loss_option(steps)

    placement = parser.add_argument_group("placement (changes no result of one device with one number of threads)")
    add_gpus_option(placement, "train")
    placement.add_argument("--device", help="cuda or cpu (default: cuda when there is one)")
    add_memory_options(placement)
    placement.add_argument("--plan", metavar="FILE", help="a plan of `protrain plan --out FILE`; skips the search")
    placement.add_argument("--step-during-backward", action="store_true", help="update inside backward; needs --clip 0")
    _add_number(placement, "threads", "CPU threads (default: torch's choice)")

    keeping = parser.add_argument_group("keeping and reporting")
    _add_number(keeping, "checkpoint_every", "steps between checkpoints; 0: none")
    _add_number(keeping, "keep", "checkpoints to keep")
    keeping.add_argument(
        "--no-model", dest="save_model", action="store_false", help="do not write the trained model at the end"
    )
    keeping.add_argument(
        "--merge", action="store_true", help="with --lora: write the whole model, adapter added, not the adapter alone"
    )
    _add_number(keeping, "held_out", "the share of the text or rows that is kept for evaluation")
    _add_number(keeping, "evaluate_every", "steps between evaluations; 0: only at the end")
    _add_number(keeping, "evaluation_batches", "batches of an evaluation")
    _add_number(keeping, "sample_tokens", "tokens to generate at the end")
    keeping.add_argument(
        "--logger", choices=LOGGERS, help="also log every step there; a resumed run continues its curve"
    )
    _add_number(keeping, "log_every", "steps between lines outside a terminal")
    keeping.add_argument(
        "--trace",
        type=trace_file,
        metavar="FILE",
        help="write a Perfetto trace of two steps, measured beside predicted; needs 5 steps",
    )
    add_output_options(parser)
    parser.set_defaults(run=imported_late("protrain.cli.train_run"))


def trace_file(text: str) -> str:
    """An argparse type: the path of a file that can be written, as text."""
    return str(writable_file(text))


def _add_number(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    """Add the option for the number ``name`` of a job, with its limits and, unless it is None, its default."""
    least, most = RANGES[name]
    kind = number(least, most) if isinstance(least, float) else whole(least, most)
    default = getattr(TrainJob, name, None)
    shown = "" if default is None else f" (default: {default:g})"
    names = [jobs.option(name)] + ["--lr"] * (name == "learning_rate")
    metavar = "X" if isinstance(least, float) else "N"
    group.add_argument(*names, type=kind, metavar=metavar, help=f"{text}{shown}")
