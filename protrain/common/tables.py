"""Text tables: numbers as people read them, in aligned columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80  # of a terminal as most people have it
_LEAST_ROOM = 28  # for the last column beside the others


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """``rows`` of text in left-aligned columns, two spaces apart; a row may end early.

    If they are wider than ``width``, the last column is wrapped where it stands, or goes below the others if there is
    little room beside them.
    """
    widths = [
        max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows), default=0))
    ]
    left = sum(widths[:-1]) + 2 * (len(widths) - 1)
    lines = []
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=False)]
        if width is None or left + widths[-1] <= width or len(row) < len(widths):
            lines.append("  ".join(cells).rstrip())
            continue
        below = width - left < _LEAST_ROOM
        start, indent = "".join(f"{cell}  " for cell in cells[:-1]), 4 if below else left
        parts = wrapped(row[-1], width - indent).splitlines() or [""]
        lines += [start.rstrip()] if below and row[-1] else [(start + parts.pop(0)).rstrip()]
        lines += [" " * indent + part for part in parts]
    return "\n".join(lines)


def wrapped(text: str, width: int = WIDTH, indent: str = "") -> str:
    """``text`` in lines of at most ``width``, the second and later ones behind ``indent``. No word is broken."""
    return "\n".join(
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(
            paragraph, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        or [""]
    )


def per_gpu(what: str, world_size: int) -> str:
    """``what`` as the title of something that every GPU has, if there are several: "host memory a GPU"."""
    return what if world_size == 1 else f"{what} a GPU"


def format_ms(milliseconds: float) -> str:
    """A time with three or four significant digits: "1.885 s", "24.3 ms"."""
    return f"{milliseconds / 1e3:.4g} s" if abs(milliseconds) >= 1e3 else f"{milliseconds:.3g} ms"


def format_change(value: float, before: float) -> str:
    """The change from ``before`` to ``value`` in percent, with its sign: "-4.1%"."""
    return f"{value / before - 1:+.1%}"
