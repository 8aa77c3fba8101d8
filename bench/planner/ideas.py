"""What ideas of the paper (arXiv 2406.08334) are worth on this engine: plans that differ in one thing only.

    python -m bench.planner.ideas --out bench/results/h100
    python -m bench.planner.ideas --only 1,2              # some of the comparisons, counted from 0

The plans are forced, not searched. All plans of a comparison have the same numbers of persistent chunks and of buffers,
and every chunk in host memory has a speculative update, so that updates run inside backward as in the paper.

swapping          Interleaved swapping and recomputation (section 3) against recomputation alone, against the same
                  number of swapped blocks in a row, and against keeping everything. In the first case blocks compute
                  nearly as long as the link takes for what they save, and they are too few to interleave. The second
                  is a usual model.
first persist     The first chunks persist, so that the next forward begins before the host's updates are done, against
                  the last ones.
execution order   Chunks packed in execution order (section 3) against definition order, for a model that defines its
                  blocks last to first. Usual transformers models define their modules in the order in which they run,
                  but for tied embeddings, so for them this idea gains nothing.

A fourth idea, to profile the memory that hooks on layers miss, needs no GPU: see bench.planner.layerwise.

Plans that fit the memory at once form a group and are measured in turns, one group after the other. The model of time
assumes that gradients arrive from the last chunk to the first, which they do not when chunks are packed in definition
order, so the prediction for that plan is only rough. On a CPU narrow models run, to show that all of it runs; nothing
there says how fast a GPU is.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import protrain
from bench.planner.chunk_order import ChunkOrder, chunks_in
from bench.planner.measure import WARM_UP
from bench.planner.output import put_out, write_out
from bench.swap.training import Case, Measured, Training, profiled
from protrain.cli.options import writable_folder
from protrain.cli.summary import device_name, versions
from protrain.common.errors import BudgetError, PlanError
from protrain.common.records import Record
from protrain.common.tables import aligned
from protrain.hardware.detection import detect
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, Plan, check, evaluate, pack
from protrain.profiler.model_profile import ModelProfile

FILE = "ideas.json"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of the plans that are compared."""

    name: str
    n_swap: int = 0
    n_ckpt: int = 0
    in_a_row: bool = False  # no recomputed block lies between swapped ones
    order: ChunkOrder = ChunkOrder.EXECUTION


Planned = tuple[Way, Plan]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans for one case. The first follows the paper's idea."""

    idea: str
    case: Case
    persistent: float  # the share of chunks that persist, rounded down to a whole chunk
    n_buffer: int | None  # None: one for each chunk in host memory
    ways: tuple[Way, ...]


_OPT = Case(family="opt", hidden=9216, layers=3, batch=32)
_LLAMA = Case(family="llama", hidden=4096, layers=8, batch=8, sequence=2048)
_FIRST_OR_LAST = (
    Way(name="the first half persists", n_ckpt=8),
    Way(name="the last half persists", n_ckpt=8, order=ChunkOrder.LAST_PERSIST),
)
COMPARISONS = (
    Comparison(
        idea="swapping",
        case=_OPT,
        persistent=0.4,  # as in the plan with the largest gain in bench/results/h100/swap-limits.json
        n_buffer=None,
        ways=(
            Way(name="2 of 3 blocks swapped", n_swap=2),
            Way(name="2 of 3 blocks recomputed", n_ckpt=2),
            Way(name="all blocks kept"),
        ),
    ),
    Comparison(
        idea="first persist",
        case=replace(_LLAMA, batch=2),
        persistent=0.5,
        n_buffer=3,
        ways=_FIRST_OR_LAST,
    ),
    Comparison(idea="first persist", case=_LLAMA, persistent=0.5, n_buffer=3, ways=_FIRST_OR_LAST),
    Comparison(
        idea="execution order",
        case=replace(_LLAMA, defined_in_reverse=True),
        persistent=0.5,
        n_buffer=3,
        ways=(
            Way(name="packed in execution order", n_ckpt=8),
            Way(name="packed in definition order", n_ckpt=8, order=ChunkOrder.DEFINITION),
        ),
    ),
    Comparison(
        idea="swapping",
        case=_LLAMA,
        persistent=0.5,
        n_buffer=3,
        ways=(
            Way(name="2 swapped, interleaved with 6 recomputed", n_swap=2, n_ckpt=6),
            Way(name="2 swapped, then 6 recomputed", n_swap=2, n_ckpt=6, in_a_row=True),
            Way(name="all 8 blocks recomputed", n_ckpt=8),
            Way(name="all blocks kept"),
        ),
    ),
)
NARROW = tuple(replace(one, case=replace(one.case, hidden=64, batch=2, sequence=32)) for one in COMPARISONS)


@dataclass(frozen=True, kw_only=True)
class MeasuredWay(Record):
    """One plan of a comparison, and what it did."""

    name: str
    chunk_order: ChunkOrder
    group: int  # the plans of one group took turns
    measured: Measured


@dataclass(frozen=True, kw_only=True)
class Compared(Record):
    """One comparison. Plans that did not fit the machine, or that the time limit left out, are missing."""

    idea: str
    case: Case
    ways: tuple[MeasuredWay, ...]


@dataclass(frozen=True, kw_only=True)
class Ideas(Record):
    """A whole run."""

    file_kind = "what bench.planner.ideas writes"

    command: str
    device: str
    versions: dict[str, str]
    comparisons: tuple[Compared, ...] = ()

    def table(self) -> str:
        """Every plan, and its time as a multiple of that of the first plan of its comparison."""
        titles = ["step (p20 to p80)", "predicted", "device memory, of planned", "host memory"]
        parts = [self.device]
        for one in self.comparisons:
            rows = [["plan", *titles, "times the first", "predicted", "group", "numbers of the plan"]]
            for way in one.ways:
                first, measured = one.ways[0].measured, way.measured
                ratios = measured.median_ms / first.median_ms, measured.plan.step_ms / first.plan.step_ms
                shown = [*(f"{ratio:.3f}" for ratio in ratios), str(way.group), str(measured.plan)]
                rows.append([way.name, *measured.cells(), *shown])
            parts += ["", f"{one.idea}: {one.case.name}", aligned(rows)]
        return "\n".join(parts)


def planned(comparison: Comparison, way: Way, profile: ModelProfile, hardware: HardwareProfile) -> Plan:
    """The plan of one way. PlanError if it does not fit."""
    layout = pack(profile)
    n_chunks = len(layout.chunks)
    n_persist = int(comparison.persistent * n_chunks)
    n_away = n_chunks - n_persist
    with chunks_in(way.order, n_persist=n_persist):
        plan = evaluate(
            profile,
            hardware,
            n_persist=n_persist,
            n_buffer=n_away if comparison.n_buffer is None else min(comparison.n_buffer, n_away),
            n_swap=way.n_swap,
            n_ckpt=way.n_ckpt,
            n_speculate=n_away,
            chunk_elements=layout.chunk_elements,
        )
        if way.in_a_row:
            order = [BlockMode.SWAP, BlockMode.CKPT, BlockMode.NONE]
            modes = tuple(sorted(plan.block_modes, key=order.index))
            plan = check(replace(plan, block_modes=modes), profile, hardware)
    return plan


def _groups(ways: Sequence[Planned], hardware: HardwareProfile) -> list[list[Planned]]:
    """``ways`` in groups of neighbours that fit the memory at once."""
    groups: list[list[Planned]] = []
    for one in ways:
        plans = [plan for _, plan in (*groups[-1], one)] if groups else []
        if (
            groups
            and sum(plan.device_bytes for plan in plans) <= hardware.device_bytes
            and sum(plan.host_bytes for plan in plans) <= hardware.host_bytes
        ):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _in_turns(
    case: Case, ways: Sequence[Planned], device: torch.device, *, rounds: int, steps: int
) -> list[tuple[Way, Measured]]:
    """All of ``ways``, wrapped at once, in turns of some steps."""
    trainings = []
    for way, plan in ways:
        with chunks_in(way.order, n_persist=plan.n_persist):
            trainings.append(Training(case, plan, device))
        trainings[-1].run(0, untimed=WARM_UP)
    for _ in range(rounds):
        for training in trainings:
            training.run(steps, untimed=1)  # the first step of a turn finds no update to wait for
            training.optimizer._engine.updates.wait()
    # The plan is the given one. That of the optimizer has predictions from another profile if there is no GPU.
    return [
        (way, replace(Measured.of(training), plan=plan)) for (way, plan), training in zip(ways, trainings, strict=True)
    ]


def compare(comparison: Comparison, device: torch.device, *, rounds: int, steps: int, until: float) -> Compared:
    """Plan and measure one comparison. No group of plans begins after ``until``, in seconds of ``time.monotonic``."""
    case, profile = comparison.case, profiled(comparison.case, device)
    _free(device)
    hardware = detect(device)
    ways: list[Planned] = []
    for way in comparison.ways:
        try:
            ways.append((way, planned(comparison, way, profile, hardware)))
        except PlanError as error:
            _say(case, way, error)
    found: list[MeasuredWay] = []
    for index, group in enumerate(_groups(ways, hardware)):
        if time.monotonic() > until:
            break
        try:
            measured = _in_turns(case, group, device, rounds=rounds, steps=steps)
        except (torch.OutOfMemoryError, BudgetError, PlanError) as error:
            for way, _ in group:
                _say(case, way, error)
        else:
            found += [
                MeasuredWay(name=way.name, chunk_order=way.order, group=index, measured=one) for way, one in measured
            ]
        _free(device)
    return Compared(idea=comparison.idea, case=case, ways=tuple(found))


def _free(device: torch.device) -> None:
    """Give back the memory of models that nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _say(case: Case, way: Way, error: Exception) -> None:
    print(f"{case.name}, {way.name}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.planner.ideas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=writable_folder, help=f"folder for {FILE}")
    parser.add_argument("--only", default="", help="comma-separated indices of comparisons (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each plan (default: 2)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn, after one more (default: 2)")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no plan begins")
    args = parser.parse_args(arguments)
    until = time.monotonic() + args.time_limit
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and detect(device).source != "measured":
        protrain.calibrate(device)
    comparisons = COMPARISONS if device.type == "cuda" else NARROW
    chosen = [int(part) for part in args.only.split(",")] if args.only else range(len(comparisons))
    result = Ideas(
        command=f"python -m bench.planner.ideas {shlex.join(arguments)}",
        device=device_name(device),
        versions=versions(),
    )
    for index in chosen:
        if time.monotonic() > until:
            break
        begin = time.monotonic()
        found = compare(comparisons[index], device, rounds=args.rounds, steps=args.steps, until=until)
        print(f"{found.idea}, {found.case.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        result = replace(result, comparisons=(*result.comparisons, found))
        write_out(result, args.out, FILE)
    put_out(result, args.out, FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
