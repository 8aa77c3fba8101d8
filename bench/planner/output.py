"""What the planner's commands that write a single table end with."""

from __future__ import annotations

from pathlib import Path

from protrain.records import Record


def put_out(table: Record, folder: Path | None, file: str) -> None:
    """Print ``table``, and write its JSON to ``file`` in ``folder`` where one is given."""
    print(table.table())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        table.save(folder / file)
