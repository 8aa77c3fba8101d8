"""Text tables: numbers as people read them, in aligned columns."""

from __future__ import annotations

import re
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


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


_TOO_MANY_BYTES = 1024**6  # the planner's arrays have 64 bits, and sums of sizes must fit too


def parse_memory(value: int | float | str, *, name: str) -> int:
    """The bytes in ``value``, which is a number of bytes or text like ``"24GiB"``.

    Raises:
        ValueError: it is neither, or too small or too large; the message names ``name``.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        size: float = value
    else:
        match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
        if match is None or match.group(2).lower() not in _UNITS:
            raise ValueError(f"{name} must be a number of bytes or text like '24GiB', not {value!r}")
        size = float(match.group(1)) * _UNITS[match.group(2).lower()]
    if not 1024 <= size < _TOO_MANY_BYTES:  # this also refuses a NaN, and a number of GiB without its unit
        raise ValueError(f"{name} must be at least 1 KiB and less than 1048576 TiB, like '24GiB', not {value!r}")
    return int(size)


def format_bytes(count: int | float) -> str:
    """``count`` bytes as text with three significant digits, or all before the point: 1536 is "1.5 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    digits = f"{size:.0f}" if units[0] == "B" or abs(size) >= 100 else f"{size:.3g}"
    return f"{digits} {units[0]}"
