"""The commands of `protrain` and their options.

What a command does is in a module that is imported when it runs. Most of these need torch, for which no help text is to
wait.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import protrain
from protrain.cli.options import count, number, prices, result_file
from protrain.cli.shapes import SHAPES, named
from protrain.common.dtypes import DTYPES, MOMENT_DTYPES, full_dtype
from protrain.hardware.shipped import shipped_names

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
  protrain plan llama2-13b --hardware rtx3090 --batch 4 --max-model
"""
_CALIBRATE_EXAMPLE = """example:
  protrain calibrate --out machine.json
  protrain plan llama2-13b --hardware machine.json

on four GPUs at once, with what they gather and exchange:
  protrain calibrate --gpus 4
"""
_CALIBRATE_DESCRIPTION = """Measure what the machine's device, link and host can do, alone and together,
in under a minute.

Close other programs first. Training and planning on this device then use the
profile, which is kept in $PROTRAIN_CACHE, $XDG_CACHE_HOME/protrain or
~/.cache/protrain."""
_EXPORT_EXAMPLE = """example:
  protrain export path/to/checkpoints exported --model path/to/model
"""
_CONVERT_EXAMPLE = """example:
  protrain convert runs/mine dcp          # its newest checkpoint
  protrain convert dcp other/checkpoints  # and back
"""
_BENCH_EXAMPLE = """examples:
  protrain bench kernels --quick --out results
  protrain bench kernels -k "flatten and gpt2" --benchmark-save=before
  protrain bench planner --out results
  protrain bench train --model llama-7b --contestants protrain,floor,fsdp2

`protrain bench kernels OPTIONS` is `pytest bench/kernels OPTIONS`. The others
are `python -m bench.planner OPTIONS` and `python -m bench.train OPTIONS`.
"""


# All options and arguments by their field, with what argparse is told of each.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "batch": {
        "type": number(int, 1, 2**16),
        "help": "sequences in a batch, on each GPU (default: the fastest for --step-tokens; on a CPU 1)",
    },
    # Each token is learnt from the tokens before it.
    "sequence": {
        "type": number(int, 2, 2**24),
        "metavar": "TOKENS",
        "help": "tokens in a sequence (default: of the model)",
    },
    "packing": {
        "action": "store_true",
        "help": "sequences hold several examples, as those of `protrain train` do, so that attention needs a mask",
    },
    "accumulation": {
        "type": number(int, 1, 2**16),
        "help": "with --batch: batches in a step, on each GPU (default: 1)",
    },
    "step_tokens": {
        "type": count,
        "metavar": "TOKENS",
        "default": 65536,
        "help": "tokens in a step, on all GPUs together, if --batch is not given (default: 65536)",
    },
    "tokens": {
        "type": count,
        "default": 10**9,
        "help": "tokens to train on, like 300M or 15B, for how long it takes (default: 1B)",
    },
    "price": {
        "type": prices,
        "metavar": "PRICE,...",
        "help": "what a GPU costs for an hour; with --compare, one for all machines or one for each",
    },
    "dtype": {
        "type": full_dtype,
        "choices": DTYPES,
        "help": "the type of weights, also as bf16, fp16 or fp32 (default: bfloat16 on a GPU, float32 on a CPU)",
    },
    "moment_dtype": {
        "type": full_dtype,
        "choices": MOMENT_DTYPES,
        "default": "float32",
        "help": "the type of Adam's two moments; bfloat16 saves 4 bytes a parameter (default: float32)",
    },
    "lora": {
        "metavar": "NAME=VALUE,...",
        "help": "train an adapter of peft and no weight of the model: r=16,alpha=32,targets=all-linear,dropout=0, or "
        "part of that; other targets are names of layers, like q_proj+v_proj",
    },
    "load_in_4bit": {
        "action": "store_true",
        "help": "with --lora: hold the weights of the model in 4 bits (QLoRA: NF4 by bitsandbytes)",
    },
    "freeze": {
        "action": "append",
        "default": [],
        "metavar": "PATTERN",
        "help": "do not train the parameters that match, like 'model.embed_tokens.*'; may be given several times",
    },
    "compile": {
        "action": argparse.BooleanOptionalAction,
        "default": None,
        "help": "compile the blocks, by which losses differ in their last digits (default: on a GPU)",
    },
    "chunked_loss": {
        "action": argparse.BooleanOptionalAction,
        "default": None,
        "help": "compute the loss in pieces, so that logits never exist whole, by which losses differ in their last "
        "digits (default: where it is known to be the same loss)",
    },
    "step_during_backward": {
        "action": "store_true",
        "help": "plan for updates inside backward, which take less host memory and exclude clipping",
    },
    "device": {"help": "cuda or cpu (default: cuda if there is a GPU)"},
    "device_memory": {
        "metavar": "SIZE",
        "help": "the memory of each GPU to stay within, like 24GiB (default: what is free); with --device cpu, the "
        "memory of a simulated GPU",
    },
    "host_memory": {
        "metavar": "SIZE",
        "help": "the RAM of the machine, of which training takes a part (default: what is free, or usual for the GPU)",
    },
    "hardware": {
        "metavar": "FILE|NAME",
        "help": "the file that `protrain calibrate --out` wrote, or one of "
        f"{', '.join(shipped_names())} (default: this machine)",
    },
    "gpus": {
        "type": number(int, 1),
        "metavar": "N",
        "default": 1,
        "help": "GPUs of the machine that train together and share its host memory (default: 1)",
    },
    "nodes": {
        "type": number(int, 1),
        "metavar": "M",
        "default": 1,
        "help": "equal machines with --gpus GPUs each (default: 1)",
    },
    "network_gbps": {
        "type": number(float, 1e-3),
        "metavar": "GB/s",
        "help": "gigabytes a second that the GPUs of a node together receive from other nodes (default: what is usual "
        "for the GPU)",
    },
    "max_model": {
        "action": "store_true",
        "help": "not a plan for MODEL, but the most layers of its width that fit",
    },
    "compare": {
        "metavar": "MACHINES",
        "help": "not one plan, but a line for each machine: whether MODEL fits, how fast it is, and what limits it, "
        "the fastest or with --price the cheapest first. Machines are names, with GPUs and nodes if several: "
        "rtx4090,h100x2,a100x8x2",
    },
    "explain": {
        "action": "store_true",
        "help": "also what each number of the plan, and more memory, would change, and what is assumed of the machine",
    },
    "picture": {
        "metavar": "FILE",
        "type": result_file,
        "help": "also a picture of one step: .png, .svg or .pdf",
    },
    "json": {"action": "store_true", "help": "print JSON on standard output instead of the table"},
    "out": {"type": result_file, "metavar": "FILE", "help": "also write the JSON to FILE"},
    "seconds": {
        "type": number(float, 0.01, 600),
        "metavar": "X",
        "help": "how long to measure; less also means smaller sizes and rougher figures, which replace no kept profile "
        "(default: 30)",
    },
    "MODEL": {
        "type": named,
        "help": "a folder with a Hugging Face config.json, a model of the Hub like org/name, or one of "
        f"{', '.join(SHAPES)}; a folder goes before a name of these",
    },
    "model": {"type": named, "required": True, "help": "the model that was trained"},
    "CHECKPOINT": {"type": Path, "help": "a folder of checkpoints, or of a Trainer"},
    "FOLDER": {"type": Path, "help": "a new or empty folder for the model"},
    "SOURCE": {"type": Path, "help": "a run, or a checkpoint of either format"},
    "TARGET": {"type": Path, "help": "where to write it in the other format"},
    "BENCHMARK": {
        "choices": ("kernels", "planner", "train"),
        "help": "kernels: each against the machine's roofs and against torch, after checking its results; planner: "
        "predicted step times and memory against measured ones, for random plans; train: one model with ProTrain, with "
        "its peers and without any optimizer",
    },
    "OPTIONS": {"nargs": argparse.REMAINDER, "help": "of the benchmark, such as --help"},
}


class Command(NamedTuple):
    """What the parser of a command is made from."""

    summary: str  # its line in the help of `protrain`
    run: str = ""  # the function that does it
    description: str = ""
    example: str = ""
    usage: str | None = None
    # By the title of a group of options their fields. Those of a tuple exclude each other.
    groups: Mapping[str, Sequence[str | tuple[str, ...]]] = {}
    own: Mapping[str, Mapping[str, Any]] = {}  # by field, what argparse is told in place of what the table says


_OUTPUT = {"output": ("json", "out")}
# `protrain train` has no options here, as main gives its words to the parser of TRL.
COMMANDS = {
    "calibrate": Command(
        summary="measure this machine",
        run="protrain.cli.runs:calibrate",
        description=_CALIBRATE_DESCRIPTION,
        example=_CALIBRATE_EXAMPLE,
        groups={"": ("gpus", "device", "seconds"), **_OUTPUT},
        own={
            "gpus": {
                "default": None,
                "help": "measure on N GPUs of this machine, as torchrun --nproc-per-node N -m protrain does "
                "(default: 1)",
            }
        },
    ),
    "plan": Command(
        summary="show the plan for a model",
        run="protrain.cli.plan_run:run",
        usage="%(prog)s MODEL [--hardware NAME] [--batch N] [OPTION ...]",
        description="Profile a model and search the plan for a machine.",
        example=_PLAN_EXAMPLE,
        groups={
            "": (
                *("MODEL", "batch", "accumulation", "step_tokens", "sequence", "packing", "dtype", "moment_dtype"),
                *("lora", "load_in_4bit", "freeze", "compile", "chunked_loss", "step_during_backward"),
            ),
            "machine": ("hardware", "device", "gpus", "nodes", "network_gbps", "device_memory", "host_memory"),
            "what is shown": ("tokens", "price", ("max_model", "compare", "explain"), "picture"),
            **_OUTPUT,
        },
    ),
    "train": Command(summary="fine-tune a language model by TRL: SFT, or DPO"),
    "export": Command(
        summary="write a checkpoint as a Hugging Face folder",
        run="protrain.cli.runs:export",
        description="Write the weights of a checkpoint as a folder for from_pretrained.",
        example=_EXPORT_EXAMPLE,
        groups={"": ("CHECKPOINT", "FOLDER", "model", "dtype", "lora")},
        own={
            "dtype": {"help": "the type of the weights (default: that of the checkpoint)"},
            "lora": {"help": "of a training with an adapter: what it was made with"},
        },
    ),
    "convert": Command(
        summary="write a checkpoint in the format of torch.distributed.checkpoint, or the other way round",
        run="protrain.cli.runs:convert",
        description="Convert a checkpoint, of any number of GPUs, to DCP of torch, or back.",
        example=_CONVERT_EXAMPLE,
        groups={"": ("SOURCE", "TARGET")},
    ),
    "bench": Command(
        summary="measure parts of ProTrain against their peers",
        run="protrain.cli.runs:bench",
        usage="%(prog)s BENCHMARK [OPTION ...]",
        description="Measure parts of ProTrain against their peers.\nNeeds a checkout of the repository, and "
        "'protrain[bench]'.",
        example=_BENCH_EXAMPLE,
        groups={"": ("BENCHMARK", "OPTIONS")},
    ),
}


def build_parser(command: str) -> argparse.ArgumentParser:
    """The parser of `protrain`, with the options of ``command`` alone."""
    parser = argparse.ArgumentParser(
        prog="protrain", description="Train models larger than the GPU, placed by one automatic plan."
    )
    parser.add_argument("--version", action="version", version=f"protrain {protrain.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, told in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=told.summary,
            usage=told.usage,
            description=told.description,
            epilog=told.example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        own.set_defaults(run=told.run)
        for title, fields in told.groups.items() if name == command else ():
            group = own.add_argument_group(title) if title else own
            for field in fields:
                exclusive = group.add_mutually_exclusive_group() if isinstance(field, tuple) else group
                for each in field if isinstance(field, tuple) else (field,):
                    _add(exclusive, each, told.own.get(each, {}))
    return parser


def _add(group: argparse._ActionsContainer, field: str, own: Mapping[str, Any]) -> None:
    """Add the argument or option for ``field`` to ``group``."""
    told = {**_ARGUMENTS[field], **own}
    if field.isupper():
        group.add_argument(field.lower(), metavar=field, **told)
    else:
        spellings = [f"--{field.replace('_', '-')}", *(["--seq"] if field == "sequence" else [])]
        group.add_argument(*spellings, dest=field, **told)
