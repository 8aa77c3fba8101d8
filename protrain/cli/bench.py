"""`protrain bench`: measures parts of ProTrain against their peers.

The benchmarks live in the repository's folder ``bench``, beside the results that they produced. The installed package
does not contain them. The command becomes the benchmark, which has options and an exit status of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

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
        ValueError: this is no checkout.
    """
    folder = Path("bench", args.benchmark)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} here: run this in a checkout of the repository")
    words = ["pytest", str(folder)] if args.benchmark == "kernels" else [f"bench.{args.benchmark}"]
    os.execv(sys.executable, [sys.executable, "-m", *words, *args.options])
