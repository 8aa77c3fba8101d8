"""`protrain bench`: measures parts of ProTrain against their peers.

The benchmarks live in the repository's folder ``bench``, beside the results that they produced. The installed package
does not contain them. The command becomes the benchmark, which has options and an exit status of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


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
