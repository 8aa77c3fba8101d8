"""The benchmark suite of the kernels: ``pytest bench/kernels``, which ``protrain bench kernels`` calls.

pytest-benchmark holds the statistics; ``--benchmark-save``, ``--benchmark-compare`` and ``--benchmark-compare-fail``
work as always, except that figures of another GPU are refused. Without a CUDA device everything is checked and nothing
timed.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Read when a kernel is decorated, so it must stand before the first import of one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(min(2, torch.get_num_threads()))

from bench.clock import device_timer
from bench.kernels.recorder import Recorder
from bench.kernels.report import summary, table
from bench.kernels.roofs import Roofs
from bench.kernels.rows import COMPILED, Row, this_machine, with_speedups
from bench.kernels.shapes import QUICK, QUICK_HEADS
from bench.kernels.timing import ColdCache

_ROWS = pytest.StashKey[list[Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel benchmarks")
    group.addoption(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write kernels.json to FOLDER",
    )
    group.addoption(
        "--quick",
        action="store_true",
        help=f"only {', '.join((*QUICK, *QUICK_HEADS))}, without torch.compile, which is most of the time, and with "
        "fewer rounds",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []
    if config.getoption("--out") is not None:  # before the measurements, as a folder that cannot be made ends the run
        try:
            config.getoption("--out").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"--out: {error}") from None
    # The rows' own table says the rest.
    config.option.benchmark_columns = config.option.benchmark_columns or ["min", "median", "iqr", "rounds"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        left_out = [
            item
            for item in items
            if _parameter(item, "shape") not in (None, *QUICK, *QUICK_HEADS)
            or _parameter(item, "implementation") == COMPILED
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("benchmark") is None:
            item.add_marker(pytest.mark.benchmark(timer=device_timer, disable_gc=True))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip a test that lacks memory of the GPU or of the host: that says nothing of the kernel or of other rows."""
    try:
        return (yield)
    except (torch.OutOfMemoryError, MemoryError) as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors, and the next test needs the memory
        reason = " ".join(str(error).split())[:200]
    pytest.skip(f"takes more memory than there is: {reason}")


def _parameter(item: pytest.Item, name: str) -> object:
    """What a test is parametrised with; None where it has no such parameter."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(name)


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # results are published, a host's name is nobody's business
    machine_info["protrain"] = this_machine().to_dict()


def pytest_benchmark_compare_machine_info(machine_info: dict[str, Any], compared_benchmark: dict[str, Any]) -> None:
    saved = compared_benchmark["machine_info"].get("protrain", {}).get("gpu", "unknown")
    here = machine_info["protrain"]["gpu"]
    if saved != here:
        raise pytest.UsageError(
            f"the saved figures were taken on {saved}, this machine has {here}: compare figures of one kind of GPU"
        )


@pytest.fixture(scope="session")
def roofs() -> Roofs | None:
    """The ceilings of the GPU; None without one."""
    return Roofs(torch.device("cuda")) if torch.cuda.is_available() else None


@pytest.fixture(scope="session")
def cold_cache() -> ColdCache | None:
    """Empties the L2 cache; None without a GPU."""
    return ColdCache(torch.device("cuda")) if torch.cuda.is_available() else None


@pytest.fixture
def recorder(
    request: pytest.FixtureRequest, benchmark: Any, roofs: Roofs | None, cold_cache: ColdCache | None
) -> Iterator[Recorder]:
    """Takes one row."""
    budget_s = 0.15 if request.config.getoption("--quick") else 0.25
    yield Recorder(benchmark, request.config.stash[_ROWS], roofs, cold_cache, budget_s=budget_s)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next shape is another size


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    recorded = config.stash[_ROWS]
    rows = with_speedups(recorded)
    if not rows:
        return
    terminalreporter.section("kernels")
    terminalreporter.write_line(table(rows))
    terminalreporter.write_line(summary(rows))
    folder = config.getoption("--out")
    if folder is not None:
        (folder / "kernels.json").write_text(json.dumps([row.flat() for row in rows], indent=1) + "\n")
        terminalreporter.write_line(f"wrote kernels.json to {folder}")
