"""Swapped blocks on the machine: packed against direct copies, and the best plan with them against the best without.

    python -m bench.swap --out bench/results/h100
    python -m bench.swap --part copies                 # the first of the two parts alone

copies   every block but the last two is swapped, once packed and once storage by storage, in steps that take turns;
         all model states stay on the device, so that nothing else is on the link. With the copies and launches of a
         step, from a trace of it, and whether all losses were the same.
limits   the device memory is limited, at the limit at which swapping is predicted to gain most. The best plan that
         swaps blocks and the best that does not, both predicted and measured.

On a CPU both parts run on a tiny model, to show that they do; nothing there says how fast a GPU is.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.planner.output import put_out, write_out
from bench.swap.copies import COPIES, CopiesRow, measure_copies
from bench.swap.limits import LIMITS, TINY_LIMITED, LimitRow, measure_limits
from bench.swap.training import TINY
from protrain.cli.options import writable_folder
from protrain.cli.summary import device_name, versions
from protrain.common.records import Record
from protrain.common.tables import aligned, format_bytes

FILE = "swap.json"


@dataclass(frozen=True, kw_only=True)
class Swaps(Record):
    """All of it."""

    command: str
    device: str
    versions: dict[str, str]
    copies: tuple[CopiesRow, ...] = ()
    limits: tuple[LimitRow, ...] = ()

    def table(self) -> str:
        """As text."""
        titles = ["step (p20 to p80)", "predicted", "device memory, of planned", "host memory"]
        rows = [["model", "a block saves", "copies", *titles, "down, up", "pack, unpack", "kernels", "losses"]]
        for copies in self.copies:
            saved = f"{format_bytes(copies.saved_bytes)} in {copies.saved_tensors}"
            for way in copies.ways:
                chosen = " *" if way.packed is copies.chosen else ""
                counts = [f"{way.copies_down}, {way.copies_up}", f"{way.pack_launches}, {way.unpack_launches}"]
                same = "same" if copies.same_losses else "DIFFER"
                kind = ("packed" if way.packed else "direct") + chosen
                rows.append([copies.case.name, saved, kind, *way.measured.cells(), *counts, str(way.kernels), same])
        parts = [f"{self.device}; * is what the runtime model chooses", aligned(rows)] if self.copies else []
        rows = [["model", "limit", *titles, "plan"]]
        for row in self.limits:
            for measured in (row.with_swaps, row.without):
                rows.append([row.case.name, format_bytes(row.limit_bytes), *measured.cells(), str(measured.plan)])
        return "\n".join([*parts, aligned(rows)] if self.limits else parts)


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.swap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=writable_folder, help=f"folder for {FILE}")
    parser.add_argument("--part", choices=("copies", "limits"), help="(default: both)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of either way of copying (default: 6)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps, of a turn or of a limited plan (default: 4)")
    args = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    copies, limits = (COPIES, LIMITS) if device.type == "cuda" else ((TINY,), (TINY_LIMITED,))
    result = Swaps(
        command=f"python -m bench.swap {shlex.join(arguments)}", device=device_name(device), versions=versions()
    )
    for case in copies if args.part != "limits" else ():
        row = measure_copies(case, device, rounds=args.rounds, steps=args.steps)
        result = _with(result, args.out, copies=(*result.copies, row))
    for case in limits if args.part != "copies" else ():
        limit_row = measure_limits(case, device, steps=args.steps)
        result = _with(result, args.out, limits=(*result.limits, limit_row))
    put_out(result, args.out, FILE)
    return 0 if all(row.same_losses for row in result.copies) else 1


def _with(result: Swaps, folder: Path | None, **rows: Any) -> Swaps:
    """``result`` with more rows, written at once: the run may be ended before its end."""
    result = replace(result, **rows)
    write_out(result, folder, FILE)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


if __name__ == "__main__":
    sys.exit(main())
