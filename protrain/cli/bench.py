"""`protrain bench`: measures parts of ProTrain against their peers.

The benchmarks live in the repository's folder ``bench``, beside the results that they produced. The installed package
doesn't contain them. Each runs in a process of its own, because it decides how Triton runs before Triton is imported. A
benchmark takes ``--out FOLDER`` and writes its JSON there, among other files.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import protrain
from protrain.cli.options import Parser, writable_folder
from protrain.common.signals import InterruptedRun, StopRequests, stop_requests

_LOOK_S = 0.1  # the time between two looks for a signal
_GRACE_S = 1.0  # the time that a benchmark has to end what it started, before everything is killed

# This code runs the module named by its first argument, as `python -m` does, without a traceback on Ctrl-C.
_MODULE = """
import runpy, sys
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One command of `protrain bench`: a module that runs ``bench/<name>`` of a checkout."""

    name: str
    help: str
    epilog: str
    words: tuple[str, ...]  # the module and its arguments; "{place}" stands for the absolute path of bench/<name>
    writes: str  # the pattern of the names of its JSON files
    needs: dict[str, str]  # from a module to its package, which the extra `bench` installs
    statuses: dict[int, int]  # from its exit status to ours, where they differ


KERNELS = Benchmark(
    name="kernels",
    help="time every kernel against the machine's roofs and against torch, after checking its results",
    epilog="""examples:
  protrain bench kernels --quick --out results
  protrain bench kernels -k "flatten and gpt2" --benchmark-save=before
  protrain bench kernels --benchmark-compare --benchmark-compare-fail=median:5%

Every option but --json is pytest's: `protrain bench kernels OPTIONS` is `pytest bench/kernels OPTIONS`.
Without a GPU the results are checked and nothing is timed.
""",
    words=("pytest", "{place}"),
    writes="kernels.json",
    needs={"pytest": "pytest", "pytest_benchmark": "pytest-benchmark"},
    statuses={2: 130, 3: 1, 4: 2, 5: 2},  # pytest's statuses: interrupted, internal error, wrong usage, nothing to run
)
PLANNER = Benchmark(
    name="planner",
    help="compare predicted step times and memory with measured ones, for random plans",
    epilog="""examples:
  protrain bench planner --out results
  protrain bench planner --read results
  protrain bench planner --kind regret --out results

Every option but --json is bench.planner's: `protrain bench planner OPTIONS` is `python -m bench.planner OPTIONS`.
""",
    words=("bench.planner",),
    writes="planner*.json",
    needs={},
    statuses={2: 2},
)
TRAIN = Benchmark(
    name="train",
    help="train one model with ProTrain, with its peers and without any optimizer, in one run",
    epilog="""examples:
  protrain bench train --model llama-7b --batch 8 --contestants protrain,floor,fsdp2 --out results
  protrain bench train --gpus 2 --model llama-7b --contestants protrain,floor,fsdp2-resident --out results

Every option but --json is bench.train's: `protrain bench train OPTIONS` is `python -m bench.train OPTIONS`.
""",
    words=("bench.train",),
    writes="compare-*.json",
    needs={"transformers": "transformers"},
    statuses={2: 2},
)
BENCHMARKS = (KERNELS, PLANNER, TRAIN)


class _ForwardingParser(Parser):
    """Collects unknown options, in order, as ``forwarded``: they are the benchmark's own."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = argparse.ArgumentParser.parse_known_args(self, args, namespace)
        found.forwarded = unknown
        return found, []


def add_bench(add_parser: Callable[..., Parser]) -> None:
    """Add `bench`, whose parser ``add_parser`` makes, with a parser for each benchmark."""
    parser = add_parser(
        description="Measure parts of ProTrain against their peers. Needs a checkout of the repository.",
        epilog="example:\n  protrain bench kernels --quick --out results\n",
    )
    names = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True, parser_class=_ForwardingParser)
    for benchmark in BENCHMARKS:
        own = names.add_parser(
            benchmark.name,
            help=benchmark.help,
            description=f"{benchmark.help[0].upper()}{benchmark.help[1:]}.",
            epilog=benchmark.epilog,
            usage=f"protrain bench {benchmark.name} [--out FOLDER] [--json] [OPTIONS]",
        )
        own.add_argument("--out", type=writable_folder, metavar="FOLDER", help="write the JSON record to FOLDER")
        own.add_argument(
            "--json", action="store_true", help="print JSON on standard output and everything else on standard error"
        )
        own.set_defaults(run=f"{__name__}.run", chosen=benchmark)


def run(args: argparse.Namespace) -> None:
    """Run `protrain bench BENCHMARK`.

    Raises:
        SystemExit: the benchmark failed; with its status.
        InterruptedRun: SIGINT, SIGTERM or SIGHUP arrived, and the benchmark has ended.
    """
    benchmark: Benchmark = args.chosen
    place = find_benchmark(benchmark)
    with stop_requests() as requests, tempfile.TemporaryDirectory() as scratch:
        folder = args.out or (scratch if args.json else None)
        out = [] if folder is None else ["--out", str(folder)]
        words = [word.format(place=place) for word in benchmark.words]
        paths = [str(place.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-c", _MODULE, *words, *out, *args.forwarded],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=sys.stderr if args.json else None,
            # A session of its own lets everything that it starts end with it. A terminal's Ctrl-C comes to this process
            # alone.
            start_new_session=True,
        )
        status = _wait(process, requests)
        results = sorted(Path(folder or scratch).glob(benchmark.writes), key=lambda path: path.stat().st_mtime)
        if args.json and results:
            print(results[-1].read_text(encoding="utf-8"), end="", flush=True)
    if requests.received:
        raise InterruptedRun(requests.received, "interrupted")
    if status:
        raise SystemExit(benchmark.statuses.get(status, 1))


def _wait(process: subprocess.Popen[bytes], requests: StopRequests) -> int:
    """Wait for ``process`` and return its exit status. After a signal, end it and all processes of its session.

    It is told to end by Ctrl-C first, so that it can end processes that have sessions of their own.
    """
    try:
        while not requests.received:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_S)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:  # also if a second signal raises KeyboardInterrupt
        if requests.received:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def find_benchmark(benchmark: Benchmark) -> Path:
    """Find ``bench/<name>``, in the checkout that is installed in place or in the current folder.

    Raises:
        ValueError: there is none, or a package that it needs isn't installed.
    """
    roots = [Path(protrain.__file__).resolve().parents[1], Path.cwd()]
    places = [root / "bench" / benchmark.name for root in roots]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise ValueError(
            f"bench/{benchmark.name} is in neither {' nor '.join(map(str, dict.fromkeys(roots)))}, and the installed "
            "package doesn't contain it: run this from a checkout of the repository"
        )
    missing = [package for module, package in benchmark.needs.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(f"{benchmark.name} needs {' and '.join(missing)}: pip install 'protrain[bench]'")
    return found
