"""What the planner's commands that write a single table begin and end with."""

from __future__ import annotations

import argparse
from pathlib import Path

from protrain.common.records import Record


def put_out(table: Record, folder: Path | None, file: str) -> None:
    """Print ``table``, and write its JSON to ``file`` in ``folder`` where one is given."""
    print(table.table())
    write_out(table, folder, file)


def write_out(table: Record, folder: Path | None, file: str) -> None:
    """Write the JSON alone, by a command that may be ended before it has measured everything."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        table.save(folder / file)


def repeating(
    arguments: list[str], *, prog: str, about: str | None, file: str, what: str, default: int
) -> argparse.Namespace:
    """``out`` and ``repeat`` of a command that does ``what`` of each case several times."""
    parser = argparse.ArgumentParser(prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=f"folder for {file}")
    parser.add_argument("--repeat", type=int, default=default, help=f"{what} of each (default: {default})")
    args = parser.parse_args(arguments)
    if args.repeat < 1:
        parser.error("--repeat must be 1 or more")
    return args
