"""Each client of ProTrain beside the same client without ProTrain: same model, data, steps and machine.

Without ProTrain a client does what its users do: fp32 weights, bf16 autocast on a GPU, fused AdamW, and
DistributedDataParallel on several GPUs. Lightning's Trainer refuses to clip with a fused AdamW, so it has torch's
default. With ProTrain the lines change that docs/clients.md shows. The model fits on the GPU, so this shows what
ProTrain costs or gains where nobody needs it, and a remark says so where a plan keeps less on the GPU. Each training
has a process of its own for each GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.calibrated import calibrate_once
from bench.clients.results import Clients, Row
from bench.clients.run import ClientJob
from bench.clients.worker import CLIENTS
from bench.train.contestants import Contestant
from bench.train.launch import supervise
from bench.train.models import build_model, refuse_too_large
from bench.train.options import Sizes, add_limits, add_sizes, commit_of_checkout, driver_of_gpu, sizes_of
from bench.train.results import Outcome
from bench.train.task import Task, make_tokens
from protrain.cli.options import Parser
from protrain.cli.summary import versions
from protrain.profiler.kept_profiles import version_of

_SIZES = Sizes(model="llama-1b", batch=4, sequence=1024, steps=20, warm_up=5)
_EXAMPLE = """examples:
  python -m bench.clients --model llama-1b --batch 8 --sequence 1024 --out bench/results/h100
  python -m bench.clients --clients loop,trainer,sft --gpus 2
"""

PLAIN = Contestant(kind="resident", compile=False, checkpoint=False)
PROTRAIN = Contestant(kind="protrain", compile=False)
_LIBRARIES = "accelerate", "datasets", "lightning", "trl", "sentence-transformers"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison: 0, 1 when a row of ProTrain's failed, 2 for an argument that the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    try:
        names = _names(args.clients)
        task = _task(args)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not on_gpu:
        print("no GPU here: this checks that everything runs; the figures mean nothing", file=sys.stderr)
    clients = _compare(args, task, names, f"python -m bench.clients {shlex.join(arguments)}")
    print(clients.table(), flush=True)
    ours = (row.protrain.error for row in clients.rows_of_clients)
    return 1 if any(error and not error.startswith("skipped") for error in ours) else 0


def _parser() -> Parser:
    parser = Parser(prog="bench.clients", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--clients", default=",".join(CLIENTS), metavar="A,B", help="(default: %(default)s)")
    add_sizes(parser, _SIZES)
    add_limits(parser)
    return parser


def _names(text: str) -> tuple[str, ...]:
    """Comma-separated names. ValueError for one that is unknown or named twice."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in CLIENTS:
            raise ValueError(f"--clients: there is no {name!r}; known: {', '.join(CLIENTS)}")
        if names.count(name) > 1:
            raise ValueError(f"--clients: {name} is there twice")
    return names


def _task(args: argparse.Namespace) -> Task:
    """ValueError when an argument does not suit the model or this machine."""
    task = Task(**sizes_of(args, _SIZES))
    model = build_model(task)  # a copy, to see that it can be
    if not torch.cuda.is_available():
        refuse_too_large(model, task)
    return task


def _compare(args: argparse.Namespace, task: Task, names: tuple[str, ...], command: str) -> Clients:
    until = time.monotonic() + args.time_limit
    if task.gpus == 1 and torch.cuda.is_available():  # the Trainer would use all GPUs that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    # Nothing is downloaded, and nobody is to wait for a network that says so.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    calibrate_once(task.gpus)
    rows: list[Row] = []

    def clients() -> Clients:
        return Clients(
            command=command,
            driver=driver_of_gpu(),
            commit=commit_of_checkout(),
            versions=versions() | {library: version_of(library) for library in _LIBRARIES},
            task=task,
            rows_of_clients=tuple(rows),
        )

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_tokens(task, folder / "tokens.pt")
        for client in names:
            found = []
            for way, contestant in (("plain", PLAIN), ("ProTrain", PROTRAIN)):
                print(f"{client}, {way} ...", end=" ", file=sys.stderr, flush=True)
                limit_s = min(args.contestant_limit, until - time.monotonic())
                found.append(_train(client, contestant, task, folder, limit_s=limit_s))
                said = found[-1].failure or f"{found[-1].median_ms:.1f} ms"
                print(said, file=sys.stderr, flush=True)
            known = CLIENTS[client]
            lines = tuple(known.lines.splitlines())
            rows.append(Row(client=client, plain=found[0], protrain=found[1], lines=lines, sequences=known.sequences))
            if args.out is not None:  # after every client, so that a run that is cut off leaves what it has
                clients().save(args.out / f"clients-{task.label}.json")
    return clients()


def _train(client: str, contestant: Contestant, task: Task, folder: Path, *, limit_s: float) -> Outcome:
    """Let ``client`` train in processes of its own, for at most ``limit_s``. What stops it is its outcome."""
    reason = _missing(client) or ("not begun: the time limit was reached" if limit_s <= 0 else "")
    if reason:
        return Outcome(contestant=contestant, error=reason)
    own = folder / f"{client}-{contestant.kind}"
    own.mkdir()
    job = ClientJob(
        task=task,
        contestant=contestant,
        client=client,
        tokens=str(folder / "tokens.pt"),
        planned_by=None,
        until=time.time() + limit_s,
    )
    job.save(own / "job.json")
    out = own / "out.json"
    command = [sys.executable, "-m", "bench.clients.worker", str(own / "job.json"), str(out)]
    return supervise(command, contestant, out, own / "log", limit_s=limit_s, gpus=task.gpus)


def _missing(client: str) -> str:
    """Why ``client`` cannot be started here: a package that is not installed; "" if all are."""
    absent = [package for package in CLIENTS[client].packages if find_spec(package) is None]
    return f"skipped: {absent[0]} is not installed (pip install {absent[0].replace('_', '-')})" if absent else ""


if __name__ == "__main__":
    sys.exit(main())
