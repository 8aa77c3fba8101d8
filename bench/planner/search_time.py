"""How long the search for a plan takes, on one core.

python -m bench.planner.search_time --out bench/results/simulated

Profiles are made on the meta device with estimated times, as for ``protrain plan --hardware``. Every case is searched
``--repeat`` times. Times are processor seconds of this process. Other processes may slow the core down all the same, so
the time of a loop of ten million additions is recorded with them.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import torch

from bench.planner.largest import profile_of
from bench.planner.output import put_out, repeating
from protrain.cli.models import read_architecture
from protrain.cli.summary import versions
from protrain.common.records import Record
from protrain.common.tables import aligned, format_ms
from protrain.hardware.memory import processor_name
from protrain.hardware.shipped import of_machine
from protrain.planning import search
from protrain.profiler.model_profile import ModelProfile

FILE = "search_time.json"
GIB = 1024**3
_ADDITIONS = 10_000_000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Search(Record):
    """One search that is timed."""

    shape: str
    batch: int
    sequence: int
    hardware: str  # name of a shipped profile
    host_gib: int
    inside: bool = False  # whether updates run inside backward; otherwise steps may be clipped
    gpus: int = 1  # of one machine, that train together

    def profile(self) -> ModelProfile:
        """The profile of the whole model."""
        return _profile(self.shape, self.batch, self.sequence)


@cache
def _profile(shape: str, batch: int, sequence: int) -> ModelProfile:
    layers = read_architecture(shape).config.num_hidden_layers
    return profile_of(shape, layers, batch=batch, sequence=sequence)


SEARCHES = (
    *(
        Search(shape="gpt2-40b", batch=batch, sequence=1024, hardware="h100", host_gib=host_gib)
        for batch in (1, 4, 8)
        for host_gib in (480, 640, 1200)
    ),
    Search(shape="gpt2-40b", batch=4, sequence=1024, hardware="h100", host_gib=640, inside=True),
    Search(shape="gpt2-40b", batch=4, sequence=1024, hardware="a100", host_gib=640),
    Search(shape="llama2-34b", batch=4, sequence=2048, hardware="h100", host_gib=520),
    Search(shape="llama2-34b", batch=4, sequence=2048, hardware="h100", host_gib=520, inside=True),
    Search(shape="llama2-13b", batch=8, sequence=2048, hardware="h100", host_gib=160),
    Search(shape="llama2-13b", batch=8, sequence=2048, hardware="h100", host_gib=116, inside=True),
    Search(shape="gpt2-10b", batch=16, sequence=1024, hardware="h100", host_gib=116),
    Search(shape="llama-7b", batch=8, sequence=2048, hardware="h100", host_gib=116),
    Search(shape="llama3-8b", batch=8, sequence=2048, hardware="h100", host_gib=116),
    Search(shape="llama3-70b", batch=4, sequence=2048, hardware="h100", host_gib=640, gpus=8),
    Search(shape="llama3-70b", batch=4, sequence=2048, hardware="h100", host_gib=2000, gpus=8),
)


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """How long one search took, and the plan that it found."""

    search: Search
    process_s: tuple[float, ...]
    plan: str
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class Table(Record):
    """A whole run."""

    command: str
    versions: dict[str, str]
    processor: str
    loop_s: float  # seconds of ten million additions in plain Python; the faster of two runs, before and after
    searched: tuple[Row, ...]

    def table(self) -> str:
        """For the terminal."""
        lines = [("model", "batch", "machine", "host", "updates", "search", "least", "most", "step", "plan")]
        for row in self.searched:
            asked = row.search
            lines.append(
                (
                    asked.shape,
                    f"{asked.batch} x {asked.sequence}",
                    asked.hardware if asked.gpus == 1 else f"{asked.gpus} x {asked.hardware}",
                    f"{asked.host_gib} GiB",
                    "inside backward" if asked.inside else "with clipping",
                    f"{statistics.median(row.process_s):.2f} s",
                    f"{min(row.process_s):.2f} s",
                    f"{max(row.process_s):.2f} s",
                    format_ms(row.step_ms),
                    row.plan,
                )
            )
        return f"{aligned(lines)}\n{self.processor}: ten million additions in plain Python take {self.loop_s:.2f} s"


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """The processor seconds that ``work`` takes, and what it returns."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def _add() -> None:
    total = 0
    for number in range(_ADDITIONS):
        total += number


def searched(asked: Search, *, repeat: int) -> Row:
    """Time ``repeat`` searches."""
    profile = asked.profile()
    machine = replace(of_machine(asked.hardware, asked.gpus), host_bytes=asked.host_gib * GIB)
    hardware = machine.shared_by(asked.gpus)
    taken, plans = zip(
        *(timed(lambda: search(profile, hardware, step_during_backward=asked.inside)) for _ in range(repeat)),
        strict=True,
    )
    return Row(search=asked, process_s=taken, plan=str(plans[-1]), step_ms=plans[-1].step_ms)


def main(argv: list[str] | None = None, searches: tuple[Search, ...] = SEARCHES) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    args = repeating(arguments, prog="bench.planner.search_time", about=__doc__, file=FILE, what="searches", default=5)
    torch.set_num_threads(1)
    loops = [timed(_add)[0]]
    rows = []
    for asked in searches:
        print(f"{asked.shape}, {asked.batch} x {asked.sequence}, {asked.host_gib} GiB", file=sys.stderr, flush=True)
        rows.append(searched(asked, repeat=args.repeat))
    loops.append(timed(_add)[0])
    result = Table(
        command=f"python -m bench.planner.search_time {shlex.join(arguments)}",
        versions=versions(),
        processor=processor_name(),
        loop_s=min(loops),
        searched=tuple(rows),
    )
    put_out(result, args.out, FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
