"""Arguments and output that are common to the planner's commands that write a single table."""

from __future__ import annotations

import argparse
from pathlib import Path

from protrain.cli.options import writable_folder
from protrain.common.records import Record


def put_out(table: Record, folder: Path | None, file: str) -> None:
    """Print ``table``, and write its JSON to ``file`` in ``folder`` if a folder is given."""
    print(table.table())
    write_out(table, folder, file)


def write_out(table: Record, folder: Path | None, file: str) -> None:
    """Write only the JSON. A command does so early if it may be stopped before it has measured everything."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        table.save(folder / file)


def repeating(
    arguments: list[str], *, prog: str, about: str | None, file: str, what: str, default: int
) -> argparse.Namespace:
    """The arguments ``out`` and ``repeat`` of a command that repeats ``what`` for each case."""
    parser = argparse.ArgumentParser(prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=writable_folder, help=f"folder for {file}")
    parser.add_argument("--repeat", type=int, default=default, help=f"{what} of each (default: {default})")
    args = parser.parse_args(arguments)
    if args.repeat < 1:
        parser.error("--repeat must be 1 or more")
    return args
