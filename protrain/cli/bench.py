"""`protrain bench`: measures parts of ProTrain against their peers.

The benchmarks live in the repository's folder ``bench``, beside the results that they produced. The installed package
doesn't contain them. The command becomes the benchmark, which has options and an exit status of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import protrain

_EXAMPLE = """examples:
  protrain bench kernels --quick --out results
  protrain bench kernels -k "flatten and gpt2" --benchmark-save=before
  protrain bench planner --out results
  protrain bench train --model llama-7b --contestants protrain,floor,fsdp2

`protrain bench kernels OPTIONS` is `pytest bench/kernels OPTIONS`. The others
are `python -m bench.planner OPTIONS` and `python -m bench.train OPTIONS`.
"""
_HELP = """kernels: each against the machine's roofs and against torch, after checking its results; planner: predicted \
step times and memory against measured ones, for random plans; train: one model with ProTrain, with its peers and \
without any optimizer"""


def add_bench(add_parser: Any) -> None:
    """Add `bench`, whose parser ``add_parser`` makes."""
    parser = add_parser(
        usage="%(prog)s BENCHMARK [OPTION ...]",
        description="Measure parts of ProTrain against their peers. Needs a checkout of the repository, and "
        "'protrain[bench]'.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("benchmark", metavar="BENCHMARK", choices=("kernels", "planner", "train"), help=_HELP)
    parser.add_argument("options", metavar="OPTION", nargs=argparse.REMAINDER, help="of the benchmark, such as --help")
    parser.set_defaults(run=f"{__name__}:run")


def run(args: argparse.Namespace) -> None:
    """Run `protrain bench BENCHMARK`, in place of this process.

    Raises:
        ValueError: there is no checkout.
    """
    roots = [Path(protrain.__file__).resolve().parents[1], Path.cwd()]
    root = next((root for root in roots if (root / "bench" / args.benchmark).is_dir()), None)
    if root is None:
        raise ValueError(
            f"bench/{args.benchmark} is in neither {' nor '.join(map(str, dict.fromkeys(roots)))}, and the installed "
            "package doesn't contain it: run this from a checkout of the repository"
        )
    is_suite = args.benchmark == "kernels"
    words = ["pytest", str(root / "bench" / "kernels")] if is_suite else [f"bench.{args.benchmark}"]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execve(sys.executable, [sys.executable, "-m", *words, *args.options], {**os.environ, "PYTHONPATH": paths})
