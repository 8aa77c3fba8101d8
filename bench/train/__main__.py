"""ProTrain beside FSDP2, DeepSpeed, torchao, LLM.Q and the compute-only floor, or clients with ProTrain and without.

Names of contestants may carry -eager (blocks not compiled), -kept (nothing checkpointed), -unclipped (ProTrain then
updates inside backward) and -narrow (ProTrain and LLM.Q: Adam's moments in bf16). FSDP2 alone has -gathered (weights
are gathered once, and stay on the GPU from forward to backward), -prefetched (weights are gathered one block ahead, in
forward too), -prefetchedN (N blocks ahead), -resident (nothing is offloaded), -residentN (N blocks are not offloaded),
and -checkpointedN (of the blocks only the first N are checkpointed). A floor checkpoints what the plan of the ProTrain
row with the same variants does.

LLM.Q trains models like Qwen2 and Llama, with masters in bf16. It recomputes whole blocks, or else nothing (-kept) or
-normsrecomputed (of blocks only norms and SwiGLU). Host memory has -offloadedvariances (the second moments) or
-offloadedmoments (both).

Clients (loop to sentences) train by their own loops, with whole logits, and nothing compiled or checkpointed. With
ProTrain the lines change that docs/clients.md shows. With -plain a client does what its users do: fp32 weights, bf16
autocast on a GPU, fused AdamW (which Lightning's Trainer refuses to clip with, so it has torch's default), and
DistributedDataParallel on several GPUs.

With --gpus N the contestants that can do it train on N GPUs of this machine, each GPU with a batch of its own. Losses
and times are those of the first GPU. A sweep finds what FSDP2 does at its best without offloading: fsdp2-resident, then
fsdp2-resident-checkpointedK with K down to the fewest that fit, fsdp2-resident-kept if it fits, and each of them with
-gathered and with -prefetched.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.calibrated import calibrate_once
from bench.train.contestants import KINDS, WITH_FLOAT8, WITH_LORA, Contestant, default, parse_all
from bench.train.launch import take_part
from bench.train.models import build_model, refuse_too_large, replace_loss
from bench.train.options import Sizes, add_limits, add_sizes, commit_of_checkout, driver_of_gpu, sizes_of, versions
from bench.train.results import Comparison, Outcome
from bench.train.task import Task, make_tokens
from bench.train.trainers import weight_dtype
from protrain.cli.options import number
from protrain.forward.chunked_loss import can_chunk
from protrain.profiler.kept_profiles import version_of

_SIZES = Sizes(model="llama-7b", batch=8, sequence=2048, steps=10, warm_up=2)
_EXAMPLE = """examples:
  python -m bench.train --model llama-7b --batch 8 --contestants protrain,floor,fsdp2 --out bench/results/h100
  python -m bench.train --model llama2-13b --batch 4 --lora r=16 --quantised nf4 --device-memory 16GiB
  python -m bench.train --gpus 2 --contestants protrain,floor,fsdp2-resident,fsdp2-gathered-resident-checkpointed8
  python -m bench.train --model llama-1b --batch 8 --sequence 1024 --contestants loop-plain,loop,sft-plain,sft
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison: 0, 1 when a row of ProTrain's failed, 2 for an argument that the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    try:
        contestants = parse_all(args.contestants or default(on_gpu=on_gpu, gpus=args.gpus, lora=args.lora is not None))
        _refuse_unable(args, contestants)
        task = _task(args, on_gpu=on_gpu, whole_logits=any(KINDS[one.kind].is_client for one in contestants))
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not on_gpu:
        print("no GPU here: this checks that everything runs; the figures mean nothing", file=sys.stderr)
    comparison = _compare(args, task, contestants, f"python -m bench.train {shlex.join(arguments)}")
    print(comparison.table())
    ours = [one.error for one in comparison.outcomes if one.contestant.is_ours]
    return 1 if any(error and not error.startswith("skipped") for error in ours) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.train",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--contestants", default="", metavar="A,B", help=f"of {', '.join(KINDS)} (default: those that suit)"
    )
    add_sizes(parser, _SIZES)
    parser.add_argument(
        "--lora",
        default=None,
        metavar="NAME=VALUE,...",
        help="train an adapter of peft, as with `protrain plan`: protrain, floor and resident (peft's own way) can",
    )
    parser.add_argument(
        "--quantised",
        choices=("nf4",),
        default=None,
        help="with --lora: the frozen blocks have 4-bit weights of bitsandbytes (QLoRA)",
    )
    parser.add_argument(
        "--float8",
        action="store_true",
        default=False,
        help="the blocks multiply in float8, by torchao: protrain, floor, resident and fsdp2 can",
    )
    parser.add_argument("--clip", type=number(float, 1e-6), default=1.0, help="norm to clip to (default: 1)")
    parser.add_argument(
        "--chunked-loss",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ProTrain's loss for all, logits never whole (default: where it is known to be the same loss)",
    )
    parser.add_argument("--host-memory", default=None, metavar="SIZE", help="of the machine, for ProTrain")
    add_limits(parser)
    return parser


def _refuse_unable(args: argparse.Namespace, contestants: tuple[Contestant, ...]) -> None:
    """ValueError for an option that one of ``contestants`` cannot follow."""
    no_clients = tuple(name for name, kind in KINDS.items() if not kind.is_client)
    several = args.accumulation > 1
    for option, wanted, able in (
        ("lora", args.lora, WITH_LORA),
        ("float8", args.float8, WITH_FLOAT8),
        ("accumulation", several, no_clients),
        ("chunked-loss", args.chunked_loss, no_clients),
    ):
        unable = [one.name for one in contestants if wanted and one.kind not in able]
        if unable:
            raise ValueError(f"--{option}: {unable[0]} cannot here; {', '.join(able)} can")


def _task(args: argparse.Namespace, *, on_gpu: bool, whole_logits: bool) -> Task:
    """ValueError when an argument does not suit the model or this machine."""
    if args.quantised and (args.lora is None or args.float8):
        raise ValueError("--quantised is for frozen weights: add --lora r=16, and leave out --float8")
    task = Task(
        **sizes_of(args, _SIZES),
        chunked_loss=bool(args.chunked_loss),
        clip_norm=args.clip,
        host_memory=args.host_memory,
        lora=args.lora,
        quantised=args.quantised,
        float8=args.float8,
    )
    model = build_model(task)  # a copy, to see that all of it can be
    if not on_gpu:
        refuse_too_large(model, task)
    replace_loss(model, task)
    if args.chunked_loss is not None or whole_logits:
        return task
    return replace(task, chunked_loss=can_chunk(model))


def _compare(args: argparse.Namespace, task: Task, contestants: tuple[Contestant, ...], command: str) -> Comparison:
    until = time.monotonic() + args.time_limit
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    outcomes: list[Outcome] = []
    packages = sorted({package for one in contestants for package in KINDS[one.kind].packages})

    def comparison() -> Comparison:
        return Comparison(
            command=command,
            driver=driver_of_gpu(),
            commit=commit_of_checkout(),
            versions=versions() | {package: version_of(package) for package in packages},
            dtype=str(weight_dtype(device)).removeprefix("torch."),
            task=task,
            outcomes=tuple(outcomes),
        )

    if task.gpus == 1 and device.type == "cuda":  # the Trainer would use all GPUs that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    # Nothing is downloaded, and nobody is to wait for a network that says so.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    if any(one.is_ours for one in contestants):
        calibrate_once(task.gpus)
    # What a contestant started may still write there while it is being killed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_tokens(task, folder / "tokens.pt")
        for contestant in contestants:
            limit_s = min(args.contestant_limit, until - time.monotonic())
            if limit_s <= 0:
                outcomes.append(Outcome(contestant=contestant, error="not begun: the time limit was reached"))
            else:
                print(f"{contestant.name} ...", end=" ", file=sys.stderr, flush=True)
                outcomes.append(take_part(contestant, task, folder, limit_s=limit_s))
                last = outcomes[-1]
                print(last.failure or f"{last.median_ms:.1f} ms", file=sys.stderr)
            if args.out is not None:  # after every one, so that a run that is cut off leaves what it has
                comparison().save(args.out / f"compare-{task.label}.json")
    return comparison()


if __name__ == "__main__":
    sys.exit(main())
