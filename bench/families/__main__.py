"""Trains tiny models of many families through wrap, and compares every bit with the plain loop.

python -m bench.families --out bench/results/cpu
python -m bench.families t5 mamba

Each family trains under a plan with everything on the device, the smallest device memory that wrap accepts, and plans
that offload all states and recompute, swap or keep every block. It runs on the CPU, within simulated budgets.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench.families.check import SAME, FamilyResult, check_family
from bench.families.known import FAMILIES
from protrain.cli.options import writable_folder
from protrain.cli.summary import device_name, versions
from protrain.common.records import Record


@dataclass(frozen=True, kw_only=True)
class Results(Record):
    """The newest run of every family, and the command that trains them all."""

    command: str
    device: str
    versions: dict[str, str]
    families: tuple[FamilyResult, ...]


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, write the record. Exit status 1 when a family differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m bench.families")
    parser.add_argument("names", nargs="*", help="families to train (default: all)")
    parser.add_argument(
        "--out", type=writable_folder, help="folder of families.json, in which the rows of these families are replaced"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.names) - FAMILIES.keys():
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    _quieten()
    file = args.out and args.out / "families.json"
    rows = {row.family: row for row in Results.load(file).families} if file and file.exists() else {}
    for name in args.names or FAMILIES:
        rows[name] = check_family(FAMILIES[name])
        print(_row(rows[name]), flush=True)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            _results(rows).save(file)
    trained = [rows[name] for name in args.names or FAMILIES]
    print(f"{sum(row.is_same for row in trained)} of {len(trained)} families have the bits of the plain loop")
    return 0 if all(row.is_same for row in trained) else 1


def _results(rows: Mapping[str, FamilyResult]) -> Results:
    return Results(
        command="python -m bench.families --out bench/results/cpu",
        device=device_name(torch.device("cpu")),
        versions=versions(),
        families=tuple(rows[name] for name in FAMILIES if name in rows),
    )


def _row(result: FamilyResult) -> str:
    """One line, and one more for each plan that failed."""
    n_same = sum(trial.verdict == SAME for trial in result.trials)
    line = (
        f"{result.family:28} {result.model:36} {result.parameters:8,} parameters {result.blocks:3} blocks "
        f"{n_same}/{len(result.trials)} plans {result.seconds:5.1f} s"
    )
    return "\n".join(
        [line, *(f"    {each.name}: {each.verdict[:600]}" for each in result.trials if each.verdict != SAME)]
    )


def _quieten() -> None:
    """Leave out what transformers says of every model of its own."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers|torch")


if __name__ == "__main__":
    sys.exit(main())
