"""Compares the computing times of a profile with those of plain steps, in which nothing is transferred.

python -m bench.planner.computing --out bench/results/h100

Each case's model is profiled, as wrapping does, and then trained without ProTrain and without an optimizer: weights and
gradients are on the device, and either no block or every block is recomputed. Each case has a process of its own. If a
plain step computes longer than its profile says, so does a step under any plan.
"""

from __future__ import annotations

import gc
import multiprocessing
import shlex
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from bench.planner.cases import CASES, Case
from bench.planner.clock import durations_ms, now
from bench.planner.measure import build, profiled
from bench.planner.output import repeating, write_out
from bench.train.models import blocks_of, fill, shape_blocks
from protrain.cli.summary import device_name, versions
from protrain.common import batch as batches
from protrain.common.records import Record
from protrain.common.tables import aligned
from protrain.hardware.detection import detect
from protrain.planning.rates import ComputeTimes, compute_times

FILE = "computing.json"
_WARM_UP = 3  # steps; a GPU that was idle has a higher clock rate at first
_KINDS = ("kept", "recomputed")
SMOKE = (Case(shape="tiny", layers=2, batch=2, sequence=64),)


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One case with every block in one mode: times of forward and backward by the device's own clock."""

    case: Case
    blocks: str  # one of _KINDS
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]  # recomputation included
    profiled_forward_ms: float
    profiled_backward_ms: float
    error: str = ""

    @property
    def line(self) -> tuple[str, ...]:
        """For the table."""
        if self.error:
            return (self.case.name, self.blocks, self.error, "", "")
        forward, backward = statistics.median(self.forward_ms), statistics.median(self.backward_ms)
        return (
            self.case.name,
            self.blocks,
            _beside(self.profiled_forward_ms, forward),
            _beside(self.profiled_backward_ms, backward),
            _beside(self.profiled_forward_ms + self.profiled_backward_ms, forward + backward),
        )


@dataclass(frozen=True, kw_only=True)
class Table(Record):
    """A whole run."""

    command: str
    device: str
    versions: dict[str, str]
    measured: tuple[Row, ...]

    def table(self) -> str:
        """For the terminal."""
        lines = [("case", "blocks", "forward, profiled of measured ms", "backward", "both")]
        return f"{aligned([*lines, *(row.line for row in self.measured)])}\n{self.device}"


def _beside(profiled_ms: float, measured_ms: float) -> str:
    return f"{profiled_ms:.1f} of {measured_ms:.1f} ({profiled_ms / measured_ms - 1:+.1%})"


def measured(case: Case, repeat: int) -> list[Row]:
    """Profile, then run ``repeat`` plain steps in each of both modes, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = compute_times(profiled(case, device), detect(device))
    rows = []
    for blocks in _KINDS:
        forward_ms, backward_ms = _of_profile(times, recomputed=blocks == "recomputed")
        try:
            taken, error = _plain_steps(case, device, recomputed=blocks == "recomputed", repeat=repeat), ""
        except torch.OutOfMemoryError as failure:
            taken, error = [], str(failure).splitlines()[0]
        rows.append(
            Row(
                case=case,
                blocks=blocks,
                forward_ms=tuple(forward for forward, _ in taken),
                backward_ms=tuple(backward for _, backward in taken),
                profiled_forward_ms=forward_ms,
                profiled_backward_ms=backward_ms,
                error=error,
            )
        )
    return rows


def _of_profile(times: ComputeTimes, *, recomputed: bool) -> tuple[float, float]:
    forward = sum(times.forward) + sum(times.gap_forward)
    return forward, sum(times.backward) + sum(times.gap_backward) + recomputed * sum(times.recompute)


def _plain_steps(case: Case, device: torch.device, *, recomputed: bool, repeat: int) -> list[tuple[float, float]]:
    """Milliseconds of forward and of backward, of each step."""
    gc.collect()  # frees the previous model, which has reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model, _, batch = build(case)
    fill(model, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    blocks = blocks_of(model)
    shape_blocks(blocks, compile=case.compile, checkpointed=[recomputed] * len(blocks))
    batch = batches.training_arguments(model, {name: tensor.to(device) for name, tensor in batch.items()})
    moments = []
    for _ in range(_WARM_UP + repeat):
        moments.append(now(device))
        output = model(**batch)
        moments.append(now(device))
        output.loss.backward()
        model.zero_grad()
    moments.append(now(device))
    durations = durations_ms(moments, device)
    return list(zip(durations[::2], durations[1::2], strict=True))[_WARM_UP:]


def main(argv: list[str] | None = None, cases: tuple[Case, ...] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    args = repeating(arguments, prog="bench.planner.computing", about=__doc__, file=FILE, what="steps", default=8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("no GPU here: a tiny model as a check that everything runs; the figures mean nothing", file=sys.stderr)
    rows: list[Row] = []

    def table() -> Table:
        return Table(
            command=f"python -m bench.planner.computing {shlex.join(arguments)}",
            device=device_name(device),
            versions=versions(),
            measured=tuple(rows),
        )

    whole = [case for case in CASES if case.layers <= 16]  # whole models do not fit with their gradients
    for case in cases or (whole if device.type == "cuda" else SMOKE):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            found = process.submit(measured, case, args.repeat).result()
        for row in found:
            print("  ".join(row.line), file=sys.stderr, flush=True)
        rows += found
        write_out(table(), args.out, FILE)
    print(table().table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
