"""Tokens a second against the batch, on one GPU and on several: predicted, with what was measured beside it.

python -m bench.planner.batches --machine h200 --measured bench/results/h200 --out bench/results/simulated

Predictions are those of `protrain plan MODEL --compare`: compiled blocks, chunked loss, clipping. Nothing is run.
Measured rows are those of ProTrain that bench.train recorded for the same model and sequence, with compiled blocks,
the chunked loss and no limit of GPU memory. The host memory of a machine is what its shipped profile says.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.planner.output import put_out
from bench.train.results import Comparison
from protrain.cli.options import writable_folder
from protrain.cli.plan_step import ProfiledStep
from protrain.cli.plan_trace import counted
from protrain.cli.summary import versions
from protrain.common.records import Record
from protrain.common.tables import aligned
from protrain.hardware.shipped import of_machine
from protrain.planning import compare
from protrain.profiler.model_profile import ModelProfile

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96)
GPUS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One batch on one number of GPUs."""

    gpus: int
    batch: int  # of each GPU
    predicted_tokens_per_s: float  # of each GPU; 0 where nothing fits
    limited_by: str
    measured_tokens_per_s: tuple[float, ...] = ()  # of each GPU, one for each record


@dataclass(frozen=True, kw_only=True)
class Table(Record):
    """All batches on all numbers of GPUs."""

    command: str
    versions: dict[str, str]
    model: str
    machine: str
    sequence: int
    found: tuple[Row, ...]

    def table(self) -> str:
        """A line for each batch."""
        lines = [["batch a GPU", *(f"{gpus} GPU{'s' * (gpus > 1)}: tokens/s a GPU (measured)" for gpus in self.gpus)]]
        for batch in dict.fromkeys(row.batch for row in self.found):
            of_batch = {row.gpus: row for row in self.found if row.batch == batch}
            lines.append([str(batch), *(_cell(of_batch[gpus]) for gpus in self.gpus)])
        return f"{self.model}, {self.sequence} tokens a sequence, {self.machine}\n\n{aligned(lines)}"

    @property
    def gpus(self) -> tuple[int, ...]:
        """The numbers of GPUs."""
        return tuple(dict.fromkeys(row.gpus for row in self.found))

    def draw(self, path: Path) -> None:
        """Write a picture. Raises ImportError if matplotlib is not installed."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for gpus, color in zip(self.gpus, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=False):
            rows = [row for row in self.found if row.gpus == gpus]
            fits = [row for row in rows if row.predicted_tokens_per_s]
            title = f"{gpus} GPU{'s' * (gpus > 1)}"
            axes.plot(
                [row.batch for row in fits],
                [row.predicted_tokens_per_s for row in fits],
                color=color,
                label=f"{title}, predicted",
            )
            points = [(row.batch, each) for row in rows for each in row.measured_tokens_per_s]
            if points:
                axes.scatter(*zip(*points, strict=True), color=color, label=f"{title}, measured", zorder=3)
        axes.set(xlabel=f"sequences of {self.sequence} tokens a GPU and step", ylabel="tokens/s a GPU", xscale="log")
        batches = sorted({row.batch for row in self.found})
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(f"{self.model}, {self.machine}")
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)


def _cell(row: Row) -> str:
    if not row.predicted_tokens_per_s:
        return f"does not fit: {row.limited_by}"
    measured = ", ".join(f"{each:,.0f}" for each in row.measured_tokens_per_s)
    return f"{row.predicted_tokens_per_s:,.0f}" + (f" ({measured})" if measured else "")


def profile_of_batch(model: str, batch: int, sequence: int) -> ModelProfile:
    """The profile on the meta device, with the forwards that bench.train gives ProTrain on a GPU."""
    step = ProfiledStep(
        model=model,
        layers=None,
        lora=None,
        load_in_4bit=False,
        freeze=(),
        batch=batch,
        sequence=sequence,
        packing=False,
        device_type="cuda",
        dtype="bfloat16",
        compile=True,
        chunked_loss=True,
    )
    return counted(step, device_bytes=sys.maxsize)  # what does not fit is a row too


def measured(folder: Path | None, model: str, sequence: int) -> dict[tuple[int, int], tuple[float, ...]]:
    """By GPUs and batch, tokens a second and GPU of every record in ``folder`` that can be compared."""
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for path in sorted(folder.glob(f"compare-{model}-*.json")) if folder else ():
        record = Comparison.load(path)
        task = record.task
        same = (task.model, task.layers, task.sequence, task.lora) == (model, None, sequence, None)
        as_it_is = task.host_share == 1.0 and task.link_gbps is None
        if not same or not task.chunked_loss or task.device_memory is not None or not as_it_is:
            continue
        for one in record.outcomes:
            name = one.contestant
            if name.kind == "protrain" and name.compile and name.clip and not name.narrow and not one.error:
                rate = task.tokens_per_step / task.gpus / statistics.median(one.step_ms) * 1e3
                key = task.gpus, task.batch
                found[key] = (*found.get(key, ()), rate)
    return found


def rows_of(args: argparse.Namespace) -> Sequence[Row]:
    """The rows of the table. The model is profiled once for each batch."""
    known = measured(args.measured, args.model, args.sequence)
    machines = {str(gpus): of_machine(args.machine, gpus).shared_by(gpus) for gpus in args.gpus}
    rows = []
    for batch in args.batches:
        print(f"{batch} x {args.sequence} ...", file=sys.stderr, flush=True)
        found = compare(profile_of_batch(args.model, batch, args.sequence), machines)
        for gpus, one in zip(args.gpus, found.machines.values(), strict=True):
            rows.append(
                Row(
                    gpus=gpus,
                    batch=batch,
                    predicted_tokens_per_s=(one.tokens_per_s or 0.0) / gpus,
                    limited_by=next(iter(one.limits), one.lacks),
                    measured_tokens_per_s=known.get((gpus, batch), ()),
                )
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.planner.batches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-7b", metavar="SHAPE")
    parser.add_argument("--machine", default="h200", metavar="NAME", help="a shipped profile (default: h200)")
    parser.add_argument("--sequence", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="SEQUENCES")
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS, metavar="N")
    parser.add_argument("--measured", type=Path, metavar="FOLDER", help="with records of bench.train")
    parser.add_argument("--out", type=writable_folder, metavar="FOLDER", help="for the JSON and the picture")
    args = parser.parse_args(arguments)
    table = Table(
        command=f"python -m bench.planner.batches {shlex.join(arguments)}",
        versions=versions(),
        model=args.model,
        machine=args.machine,
        sequence=args.sequence,
        found=tuple(rows_of(args)),
    )
    name = f"batches-{args.model}-{args.machine}"
    put_out(table, args.out, f"{name}.json")
    if args.out is not None:
        table.draw(args.out / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
