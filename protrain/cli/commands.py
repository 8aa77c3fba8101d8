"""The commands of `protrain` and their options.

What a command does is in a module that is imported when it runs. Most of these need torch, for which no help text is to
wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import protrain
from protrain.cli.bench import add_bench
from protrain.cli.job import MAY_DIFFER, add_options
from protrain.cli.options import (
    Parser,
    add_gpus_option,
    add_output_options,
    new_folder,
    number,
    whole,
    writable_file,
    writable_folder,
)
from protrain.cli.shapes import SHAPES, named
from protrain.common.tables import wrapped
from protrain.hardware.shipped import shipped_names

AddParser = Callable[..., Parser]  # makes the parser of a command of what argparse takes

_TRAIN_EXAMPLE = """example, about two minutes on two CPU cores:
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
_PLAN_EXAMPLE = """example, for a machine that is elsewhere:
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
_CALIBRATE_EXAMPLE = """example:
  protrain calibrate --out machine.json
  protrain plan llama2-13b --hardware machine.json

on four GPUs at once, with what they gather and exchange:
  protrain calibrate --gpus 4
"""
_CALIBRATE_DESCRIPTION = """Measure what the machine's device, link and host can do, alone and together, in under \
a minute.

Close other programs first. Training and planning on this device then use the profile, which is kept in \
$PROTRAIN_CACHE, $XDG_CACHE_HOME/protrain or ~/.cache/protrain."""
_EXPORT_EXAMPLE = """example:
  protrain export runs/mine exported
  protrain export path/to/checkpoints exported --model path/to/model
"""
_CONVERT_EXAMPLE = """example:
  protrain convert runs/mine dcp                # its newest checkpoint
  protrain convert dcp runs/other/checkpoints   # and back
"""


def _add_calibrate(add_parser: AddParser) -> None:
    parser = add_parser(description=_CALIBRATE_DESCRIPTION, epilog=_CALIBRATE_EXAMPLE)
    add_gpus_option(parser, "measure")
    add_options(parser, "device")
    parser.add_argument(
        "--seconds",
        type=number(0, 600, open_ended=True),
        metavar="X",
        help="how long to measure; less also means smaller sizes and rougher figures, which replace no kept profile "
        "(default: 30)",
    )
    add_output_options(parser)
    parser.set_defaults(run="protrain.cli.calibrate_run:run")


def _add_plan(add_parser: AddParser) -> None:
    parser = add_parser(
        usage="%(prog)s MODEL [--hardware NAME] [--batch N] [OPTION ...]",
        description="Profile a model and search the plan for a machine.",
        epilog=_PLAN_EXAMPLE,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=named,
        help="a folder with a Hugging Face config.json, a model of the Hub like org/name, or one of "
        f"{', '.join(SHAPES)}; a folder goes before a name of these",
    )
    add_options(
        parser,
        *("batch", "sequence", "data", "packing", "accumulation", "dtype", "moment_dtype"),
        *("lora", "load_in_4bit", "freeze", "compile", "chunked_loss", "step_during_backward"),
        sequence="tokens in a sequence (default: of the model)",
        data="the data that is to be trained on: if it is rows and no text, the plan has room for the attention mask "
        "that packed rows need",
        packing="whether several rows of --data share a sequence, and need that mask (default: they do)",
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
    parser.set_defaults(run="protrain.cli.plan_run:run")


def _add_machine_options(parser: Parser) -> None:
    """Add the options that ``protrain.cli.plan_machine.machine_of`` reads."""
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--hardware",
        metavar="FILE|NAME",
        help="the file that `protrain calibrate --out` wrote, or one of "
        f"{', '.join(shipped_names())} (default: this machine)",
    )
    on_device = "cuda or cpu (default: that of --hardware, or cuda if there is a GPU)"
    add_options(machine, "device", device=on_device)
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
    add_options(machine, "device_memory", "host_memory")


def _add_train(add_parser: AddParser) -> None:
    parser = add_parser(
        usage="%(prog)s --model MODEL [--data PATH] [--folder FOLDER] [OPTION ...]\n"
        "       %(prog)s --resume --folder FOLDER [--steps N] [OPTION ...]",
        description="Train a causal language model on text, or on rows of data such as conversations.",
        epilog=_TRAIN_EXAMPLE,
        argument_default=argparse.SUPPRESS,  # an option that was not given leaves no attribute
    )
    what = parser.add_argument_group("model and data")
    what.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options, like 'learning-rate: 1e-4' and 'compile: false'; options given here win",
    )
    add_options(what, "model", "from_scratch", "data", "column", "chat_template", "loss_on", "packing")
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
    add_options(what, "seed", "lora", "load_in_4bit", "freeze")

    steps = parser.add_argument_group("training")
    add_options(steps, "batch", "sequence", "accumulation", "steps", "learning_rate", "warmup")
    add_options(steps, "min_learning_rate", "weight_decay", "clip")
    add_options(steps, "dtype", "moment_dtype", "compile", "chunked_loss")

    placement = parser.add_argument_group(
        "where it runs",
        wrapped("These change no weights, on one kind of device and with as many threads, and batches in a step.", 78),
    )
    add_gpus_option(placement, "train")
    add_options(placement, "device", "device_memory", "host_memory", "plan", "step_during_backward", "threads")

    keeping = parser.add_argument_group("keeping and reporting")
    add_options(keeping, "checkpoint_every", "keep", "save_model", "merge", "held_out")
    add_options(keeping, "evaluate_every", "evaluation_batches", "sample_tokens", "logger", "log_every")
    keeping.add_argument(
        "--trace",
        type=writable_file,
        metavar="FILE",
        help="write a trace of two steps, measured beside predicted, for ui.perfetto.dev; needs 5 steps",
    )
    add_output_options(parser)
    parser.set_defaults(folder=None, resume=False, gpus=None, trace=None, json=False, out=None)
    parser.set_defaults(run="protrain.cli.train_run:run")


def _add_export(add_parser: AddParser) -> None:
    parser = add_parser(
        description="Write the weights of a checkpoint as a folder for from_pretrained.",
        epilog=_EXPORT_EXAMPLE,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="the folder of a run or of checkpoints")
    parser.add_argument("folder", metavar="FOLDER", type=new_folder, help="a new or empty folder for the model")
    parser.add_argument("--model", type=named, help="the model that was trained (default: that of the run)")
    add_options(
        parser,
        *("dtype", "lora", "merge"),
        dtype="the type of the weights (default: that of the run)",
        lora="the --lora of the training (default: that of the run)",
        merge="of a run with --lora: write the whole model with the adapter added",
    )
    parser.set_defaults(run="protrain.cli.export_run:export")


def _add_convert(add_parser: AddParser) -> None:
    parser = add_parser(
        description="Convert a checkpoint, of any number of GPUs, to torch.distributed.checkpoint, or back.",
        epilog=_CONVERT_EXAMPLE,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a run, or a checkpoint of either format")
    parser.add_argument("target", metavar="TARGET", type=writable_folder, help="where to write it in the other format")
    parser.set_defaults(run="protrain.cli.export_run:convert")


# From the name of a command to its line in the help of `protrain`, and the function that adds its parser.
COMMANDS = {
    "calibrate": ("measure this machine", _add_calibrate),
    "plan": ("show the plan for a model", _add_plan),
    "train": ("train a causal language model", _add_train),
    "export": ("write a checkpoint as a Hugging Face folder", _add_export),
    "convert": (
        "write a checkpoint in the format of torch.distributed.checkpoint, or the other way round",
        _add_convert,
    ),
    "bench": ("measure parts of ProTrain against their peers", add_bench),
}


def build_parser(command: str) -> Parser:
    """The parser of `protrain`, with the options of ``command`` alone."""
    parser = Parser(prog="protrain", description="Train models larger than the GPU, placed by one automatic plan.")
    parser.add_argument("--version", action="version", version=f"protrain {protrain.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (summary, add_options_to) in COMMANDS.items():
        add_parser = partial(commands.add_parser, name, help=summary)
        if name == command:
            add_options_to(add_parser)
        else:
            add_parser()
    return parser
