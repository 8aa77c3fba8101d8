"""Text tables: numbers as people read them, in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """``rows`` of text in left-aligned columns, two spaces apart; a row may end early."""
    widths = [
        max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows), default=0))
    ]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
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
