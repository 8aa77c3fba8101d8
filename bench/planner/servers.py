"""How fast the paper's models train on its two servers, with one GPU and with four, simulated from shipped profiles.

python -m bench.planner.servers --out bench/results/simulated

Nothing is run. Every model has the batch, of those asked for, with the most tokens a second. The paper (arXiv
2406.08334) trains with 1,024 tokens a sequence, and states means over its models: on four GPUs ProTrain is 1.97 times
(RTX 3090) and 1.85 times (A100) as fast as DeepSpeed, and four A100s train 3.5 to 3.64 times as fast as one.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.planner.largest import ASSUMPTIONS, MACHINES, Machine, profile_of
from bench.planner.output import put_out
from protrain.cli.models import read_architecture
from protrain.cli.options import writable_folder
from protrain.cli.summary import versions
from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.common.tables import aligned, format_ms
from protrain.planning import Plan, search

FILE = "servers.json"
SEQUENCE = 1024
SHAPES = (
    *("mistral-7b", "gpt2-10b", "opt-13b", "llama2-13b", "gpt2-15b"),
    *("gpt2-20b", "opt-30b", "gpt2-30b", "llama2-34b", "gpt2-40b"),
)
BATCHES = (2, 8, 32)


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One model on one server, with its fastest batch on one GPU and on four. A plan is None if no batch fits."""

    shape: str
    machine: Machine
    batch: int  # sequences a GPU; 0 if nothing fits
    plan: Plan | None
    alone_batch: int
    alone: Plan | None

    @property
    def scaling(self) -> float | None:
        """Tokens a second of all GPUs over those of one."""
        if self.plan is None or self.alone is None:
            return None
        return self.plan.tokens_per_s / self.alone.tokens_per_s

    def cells(self, n_parameters: int) -> list[str]:
        """The row as text."""
        cells = [self.shape, self.machine.title]
        for batch, plan in ((self.alone_batch, self.alone), (self.batch, self.plan)):
            if plan is None:
                cells += ["-", "-", "-", "-"]
                continue
            tflops = 6 * n_parameters * plan.tokens_per_s / plan.world_size / 1e12
            cells += [str(batch), format_ms(plan.step_ms), f"{plan.tokens_per_s:,.0f}", f"{tflops:.0f}"]
        return [*cells, "-" if self.scaling is None else f"{self.scaling:.2f}"]


@dataclass(frozen=True, kw_only=True)
class Table(Record):
    """The whole table, with its assumptions."""

    command: str
    versions: dict[str, str]
    sequence: int
    assumptions: tuple[str, ...]
    parameters: dict[str, int]  # by shape
    rows_found: tuple[Row, ...]

    def table(self) -> str:
        """The table as text."""
        of_one, of_all = ([f"batch, {count}", "step", "tokens/s", "6NT TFLOP/s a GPU"] for count in ("one GPU", "all"))
        rows = [["model", "machine", *of_one, *of_all, "all over one"]]
        rows += [row.cells(self.parameters[row.shape]) for row in self.rows_found]
        return "\n".join([aligned(rows), "", *(f"- {line}" for line in self.assumptions)])


def rows_of(shape: str, batches: tuple[int, ...], machines: list[Machine]) -> Iterator[Row]:
    """The rows of one model, which is profiled once for each batch."""
    layers = read_architecture(shape).config.num_hidden_layers
    profiles = {batch: profile_of(shape, layers, batch=batch, sequence=SEQUENCE) for batch in batches}

    def fastest(machine: Machine) -> tuple[int, Plan | None]:
        found: tuple[int, Plan | None] = (0, None)
        for batch, profile in profiles.items():
            try:
                plan = search(profile, machine.hardware(), step_during_backward=True)
            except PlanError:
                continue
            if found[1] is None or plan.tokens_per_s > found[1].tokens_per_s:
                found = batch, plan
        return found

    for machine in machines:
        batch, plan = fastest(machine)
        alone_batch, alone = fastest(replace(machine, gpus=1))
        yield Row(shape=shape, machine=machine, batch=batch, plan=plan, alone_batch=alone_batch, alone=alone)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.planner.servers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=writable_folder, help=f"folder for {FILE}")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SHAPE")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="SEQUENCES")
    args = parser.parse_args(arguments)
    machines = [machine for machine in MACHINES if (machine.gpus, machine.nodes) == (4, 1)]
    rows: list[Row] = []
    for shape in args.shapes:
        print(f"{shape} ...", file=sys.stderr, flush=True)
        rows += rows_of(shape, tuple(args.batches), machines)
    of_states, *others = ASSUMPTIONS
    result = Table(
        command=f"python -m bench.planner.servers {shlex.join(arguments)}",
        versions=versions(),
        sequence=SEQUENCE,
        assumptions=(
            "updates inside backward, as in the paper; " + of_states.format(states=12, moments="float32"),
            *(line for line in others if "depth" not in line),
            "no chunked loss, blocks not compiled; the fastest of the batches "
            f"{', '.join(map(str, args.batches))} x {SEQUENCE} on each GPU",
        ),
        parameters={shape: profile_parameters(shape) for shape in args.shapes},
        rows_found=tuple(rows),
    )
    put_out(result, args.out, FILE)
    return 0


def profile_parameters(shape: str) -> int:
    """The number of parameters of ``shape``, tied ones once."""
    return sum(parameter.numel() for parameter in read_architecture(shape).model.parameters())


if __name__ == "__main__":
    sys.exit(main())
