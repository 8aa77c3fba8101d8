"""The largest models that have a plan on the paper's machines, simulated from the shipped profiles.

python -m bench.planner.largest --out bench/results/simulated

Nothing is run. Depths are those that fit by the memory model, and times are estimated from counted operations. The
paper's figures (arXiv 2406.08334, the largest models) are sizes of whole models that were trained. The paper does not
say of which family, so its figure is shown for every family. Sixteen A100s are two nodes of eight, for which no figure
of the paper is stated here.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch

import protrain
from bench.planner.output import put_out
from protrain.cli.models import read_architecture
from protrain.cli.options import writable_folder
from protrain.cli.summary import versions
from protrain.cli.trained import adamw
from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.common.tables import aligned, format_bytes, format_ms
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import of_machine
from protrain.planning import largest
from protrain.planning.sweeps import Largest
from protrain.profiler.model_profile import ModelProfile

FILES = {"float32": "largest.json", "bfloat16": "largest-bf16-moments.json"}
GIB = 1024**3
HOST_SHARE = 0.9  # the share of the host's memory that a plan may take by default
ASSUMPTIONS = (
    "{states} bytes a parameter: bfloat16 weight, 16 bits more of the fp32 master, two moments in {moments}; with "
    "clipping 2 more, of the gradient, with updates inside backward a few regions that gradients share",
    f"a plan may take {HOST_SHARE:.0%} of a host's memory, and of a GPU's what the shipped profile gives as usable",
    "GPUs of a host share its memory, and each has a shard of every chunk",
    "every block checkpointed; depth is what varies, at the width of the named shape; attention as the fused kernel",
    "rates of the shipped profiles: scaled from datasheets, not measured; times of layers from counted operations",
)


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """One row of the paper's table."""

    profile: str  # name of a shipped profile
    gpu: str
    host_gib: int
    paper_billions: float | None  # parameters of the paper's largest model, None if it is not known
    gpus: int = 1  # of each node
    nodes: int = 1

    def hardware(self) -> HardwareProfile:
        """The profile of one of the GPUs, with its part of this host."""
        whole = replace(of_machine(self.profile, self.gpus), host_bytes=int(self.host_gib * GIB * HOST_SHARE))
        return whole.shared_by(self.gpus, self.nodes)

    @property
    def title(self) -> str:
        """The machine in words."""
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return f"{nodes}{self.gpus} x {self.gpu}, {self.host_gib} GiB host"


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One family on one machine."""

    machine: Machine
    shape: str  # the model whose width the family has
    step_during_backward: bool  # updates inside backward, as in the paper; otherwise with exact clipping
    found: Largest

    @property
    def updates(self) -> str:
        """When updates are made."""
        return "inside backward" if self.step_during_backward else "with clipping"


@dataclass(frozen=True, kw_only=True)
class Table(Record):
    """The whole table, with its assumptions."""

    command: str
    versions: dict[str, str]
    batch: int
    sequence: int
    assumptions: tuple[str, ...]
    rows_found: tuple[Row, ...]

    def table(self) -> str:
        """The table as text."""
        titles = "machine", "width of", "updates", "layers", "parameters", "paper", "step", "tokens/s", "device", "host"
        rows = [[*titles, "plan"]]
        for row in self.rows_found:
            found, plan = row.found, row.found.plan
            rows.append(
                [
                    row.machine.title,
                    row.shape,
                    row.updates,
                    str(found.layers),
                    f"{found.parameters / 1e9:.1f} B",
                    "-" if row.machine.paper_billions is None else f"{row.machine.paper_billions:g} B",
                    format_ms(plan.step_ms),
                    f"{found.tokens_per_s:.3g}",
                    format_bytes(plan.device_bytes),
                    format_bytes(plan.host_bytes),
                    str(plan),
                ]
            )
        title = f"batch {self.batch} x {self.sequence} tokens on each GPU; memory of one GPU and its part of the host"
        return "\n".join([title, aligned(rows), "", *(f"- {line}" for line in self.assumptions)])


_RTX_3090, _A100 = ("rtx3090", "RTX 3090 24 GB", 384), ("a100", "A100 80 GB", 1024)  # with the paper's hosts


def _machine(known: tuple[str, str, int], paper_billions: float | None, gpus: int = 1, nodes: int = 1) -> Machine:
    profile, gpu, host_gib = known
    return Machine(profile=profile, gpu=gpu, host_gib=host_gib, paper_billions=paper_billions, gpus=gpus, nodes=nodes)


MACHINES = (
    _machine(_RTX_3090, 34),
    _machine(_RTX_3090, 37, gpus=4),
    _machine(_A100, 75),
    _machine(_A100, 87, gpus=4),
    _machine(_A100, None, gpus=8, nodes=2),
)
SHAPES = ("gpt2-40b", "opt-30b", "llama2-34b", "mistral-7b")


def profile_of(shape: str, layers: int, *, batch: int, sequence: int, moment_dtype: str = "float32") -> ModelProfile:
    """The profile of ``shape`` at another depth, on the meta device."""
    loaded = read_architecture(shape, layers=layers)
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    profile = protrain.profile(
        loaded.model,
        {"input_ids": ids, "labels": ids},
        optimizer=adamw(loaded.model, loaded.learning_rate, weight_decay=0.0),
        device=torch.device("meta"),
        dtype=torch.bfloat16,
    )
    return replace(profile, moment_dtype=moment_dtype)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.planner.largest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=writable_folder, help=f"folder for {' or '.join(FILES.values())}")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens; the paper's is the default")
    parser.add_argument("--moment-dtype", choices=tuple(FILES), default="float32", help="(default: float32)")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SHAPE", help="families, by a shape's width")
    args = parser.parse_args(arguments)
    rows = []
    profile_once = cache(profile_of)  # machines and kinds of updates ask for the same depths
    for machine, shape, inside in product(MACHINES, args.shapes, (False, True)):

        def profile_at(layers: int, shape: str = shape) -> ModelProfile:
            size = {"batch": args.batch, "sequence": args.sequence}
            return profile_once(shape, layers, **size, moment_dtype=args.moment_dtype)

        try:
            found = largest(profile_at, machine.hardware(), step_during_backward=inside)
        except PlanError as error:
            print(f"{machine.title}, {shape}: {error}", file=sys.stderr)
            return 1
        row = Row(machine=machine, shape=shape, step_during_backward=inside, found=found)
        print(f"{machine.title}, {shape}, {row.updates}: {found.parameters / 1e9:.1f} B", file=sys.stderr, flush=True)
        rows.append(row)
    states = {"float32": 12, "bfloat16": 8}[args.moment_dtype]
    result = Table(
        command=f"python -m bench.planner.largest {shlex.join(arguments)}",
        versions=versions(),
        batch=args.batch,
        sequence=args.sequence,
        assumptions=tuple(line.format(states=states, moments=args.moment_dtype) for line in ASSUMPTIONS),
        rows_found=tuple(rows),
    )
    put_out(result, args.out, FILES[args.moment_dtype])
    return 0


if __name__ == "__main__":
    sys.exit(main())
