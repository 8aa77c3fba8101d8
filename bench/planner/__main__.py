"""Predicted against measured step time and memory, for plans drawn at random.

python -m bench.planner --out bench/results/h100          measure and report
python -m bench.planner --read bench/results/h100         report with today's models on recorded measurements
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.planner.accuracy import table
from bench.planner.cases import CASES, SMOKE, Case
from bench.planner.picture import draw_scatter
from bench.planner.results import CaseResult, Results
from protrain.cli.summary import device_name, versions

FILE = "planner.json"


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 1 when a case could not be measured."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(arguments)
    if args.read is not None:
        results = Results.load(args.read / FILE if args.read.is_dir() else args.read)
        failed: list[str] = []
    else:
        results, failed = _measure(args, f"python -m bench.planner {shlex.join(arguments)}")
    print(table(results.cases))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        if args.read is None:
            results.save(args.out / FILE)
        try:
            draw_scatter(results.cases, args.out / "planner.png")
        except ImportError:
            print("no picture: pip install matplotlib", file=sys.stderr)
    for failure in failed:
        print(failure, file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help=f"folder for {FILE} and a scatter plot")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="measure nothing: judge what lies in FOLDER")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases by name")
    parser.add_argument("--part", choices=("tuned", "held-out", "both"), default="both")
    parser.add_argument("--host-memory", help="for a machine whose free memory is not all there is")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a plan (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the plans drawn")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="begin no plan after")
    return parser


def _measure(args: argparse.Namespace, command: str) -> tuple[Results, list[str]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("no GPU here: a few tiny plans as a check that everything runs; the figures mean nothing")
    until = time.time() + args.time_limit
    found, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case in _chosen(args, SMOKE if device.type == "cpu" else CASES):
            if time.time() > until:
                failed.append(f"{case.name}: not begun in time")
                continue
            source, out = Path(folder) / "case.json", Path(folder) / f"{case.name}.json"
            case.save(source)
            worker = [sys.executable, "-m", "bench.planner.worker", str(source), str(out)]
            options = ["--seed", str(args.seed), "--steps", str(args.steps), "--until", str(until)]
            status = subprocess.run([*worker, *options], check=False).returncode
            if out.exists():
                found.append(CaseResult.load(out))
            if status != 0:
                failed.append(f"{case.name}: exit status {status}")
    results = Results(command=command, device=device_name(device), versions=versions(), cases=tuple(found))
    return results, failed


def _chosen(args: argparse.Namespace, cases: tuple[Case, ...]) -> list[Case]:
    chosen = []
    for case in cases:
        part = args.part == "both" or (args.part == "held-out") is case.held_out
        if part and re.search(args.only, case.name):
            chosen.append(case if args.host_memory is None else case.with_host_memory(args.host_memory))
    return chosen


if __name__ == "__main__":
    sys.exit(main())
