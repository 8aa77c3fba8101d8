"""Compares predictions of the planner with measurements on the machine.

python -m bench.planner --out bench/results/h100      predicted against measured, for plans drawn at random
python -m bench.planner --kind accumulated --out ...  predicted against measured, for steps of several micro-batches
python -m bench.planner --kind regret --out ...       the chosen plan against others, on the machine
python -m bench.planner --gpus 2 --out ...            the same for training on several GPUs together
python -m bench.planner --read bench/results/h100     judge recorded measurements with today's models
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.calibrated import calibrate_once
from bench.planner import accuracy
from bench.planner.cases import ACCUMULATED, CASES, REGRET, SMOKE, Case
from bench.planner.results import CaseResult, Results
from bench.train.options import device_name, versions
from bench.train.ranks import run_ranks

# The cases of each kind of comparison, and the table of their results.
_KINDS: dict[str, tuple[tuple[Case, ...], Callable[[Sequence[CaseResult]], str]]] = {
    "accuracy": (CASES, accuracy.table),
    "accumulated": (ACCUMULATED, accuracy.table),
    "regret": (REGRET, accuracy.regret_table),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 1 when a case could not be measured, 2 for what the user can mend."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args = parser.parse_args(arguments)
    failed: list[str] = []
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: {error}")
    if args.read is not None:
        try:
            results = Results.load(args.read / _file(args) if args.read.is_dir() else args.read)
        except ValueError as error:
            parser.error(f"--read: {error}")
    else:
        results, failed = _measure(args, f"python -m bench.planner {shlex.join(arguments)}")
    print(_KINDS[args.kind][1](results.cases))
    for failure in failed:
        print(failure, file=sys.stderr)
    return 1 if failed else 0


def _file(args: argparse.Namespace) -> str:
    """The name of the record, which tells on how many GPUs it was made."""
    kind = "" if args.kind == "accuracy" else f"-{args.kind}"
    gpus = "" if args.gpus == 1 else f"-{args.gpus}gpus"
    return f"planner{kind}{gpus}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=tuple(_KINDS), default="accuracy", help="(default: accuracy)")
    parser.add_argument("--out", type=Path, help="folder for the measurements")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="measure nothing: judge what lies in FOLDER")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="of this machine, that train together")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases by name")
    parser.add_argument("--part", choices=("tuned", "held-out", "both"), default="both", help="(default: both)")
    parser.add_argument("--host-memory", help="limit of each case, for a machine whose memory is not all free")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a plan (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the plans drawn")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="for a trace of every plan, measured and predicted"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="start no plan after this time; with --kind regret each case has its share of it",
    )
    return parser


def _measure(args: argparse.Namespace, command: str) -> tuple[Results, list[str]]:
    until = time.time() + args.time_limit
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("no GPU here: a few tiny plans as a check that everything runs; the figures mean nothing")
    found: list[CaseResult] = []
    failed: list[str] = []
    cases = _chosen(args, device)
    calibrate_once(args.gpus)
    with tempfile.TemporaryDirectory() as folder:
        results = Results(command=command, device=device_name(device), versions=versions(), cases=())
        for index, case in enumerate(cases):
            # A descent has no fixed length, so each case gets its share of the time that is left.
            share = 1 / (len(cases) - index) if args.kind == "regret" else 1.0
            own_until = time.time() + (until - time.time()) * share
            result, failure = _run(case, Path(tempfile.mkdtemp(dir=folder)), args, own_until)
            found += [] if result is None else [result]
            failed += [failure] if failure else []
            results = replace(results, cases=tuple(found))
            if args.out is not None:  # after every case, so that a run that is stopped keeps its results
                results.save(args.out / _file(args))
    return results, failed


def _run(case: Case, folder: Path, args: argparse.Namespace, until: float) -> tuple[CaseResult | None, str]:
    """Measure ``case`` in a process of its own. Returns its results, and an error if they are not complete."""
    if time.time() > until:
        return None, f"{case.name}: not started in time"
    source, out = folder / "case.json", folder / "result.json"
    case.save(source)
    worker = [sys.executable, "-m", "bench.planner.worker", str(source), str(out), "--kind", args.kind]
    options = ["--seed", str(args.seed), "--steps", str(args.steps), "--until", str(until)]
    options += [] if args.traces is None else ["--traces", str(args.traces)]
    status = run_ranks([*worker, *options], args.gpus)
    return CaseResult.load(out) if out.exists() else None, f"{case.name}: exit status {status}" if status else ""


def _chosen(args: argparse.Namespace, device: torch.device) -> list[Case]:
    chosen = []
    small = [replace(case, accumulation=2) for case in SMOKE] if args.kind == "accumulated" else SMOKE
    for case in small if device.type == "cpu" else _KINDS[args.kind][0]:
        part = args.part == "both" or (args.part == "held-out") is case.held_out
        if part and re.search(args.only, case.name):
            chosen.append(case if args.host_memory is None else case.with_host_memory(args.host_memory))
    return chosen


if __name__ == "__main__":
    sys.exit(main())
