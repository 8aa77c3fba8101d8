"""Results as people read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.kernels.rows import Row
from protrain.common.tables import aligned, format_bytes

_NOTHING = "-"
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("implementation", lambda row: f"{row.implementation} {row.version}".strip()),
    ("median (p20-p80) ms", lambda row: _times(row)),
    ("GB/s", lambda row: _number(row.gbps, "{:,.0f}")),
    ("of roof", lambda row: _number(row.percent_of_roof, "{:.1f}%")),
    ("of datasheet", lambda row: _number(row.percent_of_datasheet, "{:.1f}%")),
    ("over eager", lambda row: _number(row.speedup_over_eager, "{:.2f}x")),
    ("over compile", lambda row: _number(row.speedup_over_compile, "{:.2f}x")),
    ("over best peer", lambda row: _number(row.speedup_over_best_peer, "{:.2f}x")),
    ("host us", lambda row: _number(row.host_us, "{:.0f}")),
    ("extra memory", lambda row: _NOTHING if row.extra_memory_bytes is None else format_bytes(row.extra_memory_bytes)),
    ("verdict", lambda row: row.verdict),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, a paragraph for every operator, shape and type. A column without values is left out."""
    columns = {name: [value(row) for row in rows] for name, value in _COLUMNS}
    columns = {name: column for name, column in columns.items() if set(column) != {_NOTHING}}
    head, *texts = aligned([list(columns), *zip(*columns.values(), strict=True)]).splitlines()
    lines = []
    group = None
    for row, text in zip(rows, texts, strict=True):
        if row.group != group:
            group = row.group
            size = f"{format_bytes(row.bytes)} to move, limited by {row.roof}"
            lines += ["", f"{row.operator}: {row.shape}, {row.dtype}; {size}"]
            lines.append(f"  {head}")
        lines.append(f"  {text}")
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines[1:])


def summary(rows: Sequence[Row]) -> str:
    """What the rows come to in one or two lines, the machine among them."""
    machine = rows[0].machine
    red = sum(row.red for row in rows)
    timed = sum(row.median_ms is not None for row in rows)
    verdicts = f"{len(rows) - red} of {len(rows)} correct"
    if machine.gpu == "none":
        figures = "no CUDA device on this machine: correctness was checked, nothing was timed"
    else:
        figures = f"{timed} timed on {machine.gpu} (driver {machine.driver})"
    versions = f"torch {machine.torch}, triton {machine.triton}, commit {machine.commit}"
    return f"{verdicts}; {figures}\n{versions}; {machine.cpu}"


def _times(row: Row) -> str:
    if row.median_ms is None or row.p20_ms is None or row.p80_ms is None:
        return _NOTHING
    return f"{row.median_ms:.4g} ({row.p20_ms:.4g}-{row.p80_ms:.4g})"


def _number(value: float | None, pattern: str) -> str:
    return _NOTHING if value is None else pattern.format(value)
