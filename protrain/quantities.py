"""Bytes as people write them ("24GiB") and back. GiB is 1024**3; "GB" is accepted and means 1000**3."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kib": 1024,
    "kb": 1000,
    "m": 1024**2,
    "mib": 1024**2,
    "mb": 1000**2,
    "g": 1024**3,
    "gib": 1024**3,
    "gb": 1000**3,
    "t": 1024**4,
    "tib": 1024**4,
    "tb": 1000**4,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | float | str, *, name: str = "size") -> int:
    """Bytes in ``value``: a number of bytes, or text like ``"24GiB"``. ValueError names ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{name} must be a number of bytes or text like '24GiB', not {value!r}")
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name} must be a number of bytes or text like '24GiB', not {value!r}")
        value = float(match.group(1)) * unit
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be more than 0 bytes, not {value!r}")
    return int(value)


def format_bytes(count: int | float) -> str:
    """``count`` bytes as text with three significant digits, or all before the point: 1536 -> "1.5 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    digits = f"{size:.0f}" if units[0] == "B" or abs(size) >= 100 else f"{size:.3g}"
    return f"{digits} {units[0]}"
