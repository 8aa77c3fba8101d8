"""Reads and writes numbers of bytes as people write them ("24GiB"). GiB is 1024**3, and GB is 1000**3."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


_LEAST_MEMORY_BYTES = 1024  # a smaller number without a unit is probably meant in GiB
_TOO_MANY_BYTES = 1024**6  # the planner's arrays have 64 bits, and sums of sizes must fit too


def parse_memory(value: int | float | str, *, name: str) -> int:
    """The bytes in ``value``, which is a number of bytes or text like ``"24GiB"``.

    Raises:
        ValueError: it is neither, or a bare number that is too small to be bytes; the message names ``name``.
    """
    size: float
    if isinstance(value, int | float) and not isinstance(value, bool):
        size, unit = value, ""
    else:
        match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
        if match is None or match.group(2).lower() not in _UNITS:
            raise ValueError(f"{name} must be a number of bytes or text like '24GiB', not {value!r}")
        unit = match.group(2).lower()
        size = float(match.group(1)) * _UNITS[unit]
    if not unit and 0 < size < _LEAST_MEMORY_BYTES:
        raise ValueError(f"{name} {value!r} is bytes: write '{str(value).strip()}GiB'")
    if size >= _TOO_MANY_BYTES:
        raise ValueError(f"{name} must be less than 1048576 TiB, like '24GiB', not {value!r}")
    if not size >= 1:  # this also refuses a NaN
        raise ValueError(f"{name} must be more than 0 bytes, like '24GiB', not {value!r}")
    return int(size)


def format_bytes(count: int | float) -> str:
    """``count`` bytes as text with three significant digits, or all before the point: 1536 is "1.5 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    digits = f"{size:.0f}" if units[0] == "B" or abs(size) >= 100 else f"{size:.3g}"
    return f"{digits} {units[0]}"
