"""A measured profile as people read it: every figure with its spread and its share of the datasheet, and warnings."""

from __future__ import annotations

from collections.abc import Sequence

from protrain.common.quantities import format_bytes
from protrain.hardware.profile import Contention, Figure, HardwareProfile

_HEAD = ("", "at", "median", "p20", "p80", "", "of datasheet")


def report(profile: HardwareProfile) -> str:
    """The printed form of a profile that ``calibrate`` returned."""
    parts = [_machine(profile), *_figures(profile.figures), *_contention(profile.contention)]
    parts += ["", *(f"warning: {line}" for line in profile.warnings)] if profile.warnings else []
    return "\n".join(parts)


def percent_of_datasheet(figure: Figure) -> float | None:
    """How much of what the maker promises was reached; None where no promise is known."""
    return None if not figure.datasheet else 100 * figure.median / figure.datasheet


def _machine(profile: HardwareProfile) -> str:
    driver = "" if profile.driver == "none" else f", driver {profile.driver}"
    memory = f"{format_bytes(profile.device_bytes)} on the device, {format_bytes(profile.host_bytes)} on the host"
    processes = f", {profile.world_size} processes" if profile.world_size > 1 else ""
    return (
        f"{profile.name}{driver}, torch {profile.torch_version}{processes}\n"
        f"{profile.processor}, {profile.cpu_threads} cores; usable memory: {memory}\n"
        f"AdamW on the host is best with {profile.host_adam_threads} threads\n"
    )


def _figures(figures: Sequence[Figure]) -> list[str]:
    rows: list[tuple[str, ...]] = [_HEAD]
    for figure in figures:
        percent = percent_of_datasheet(figure)
        rates = (f"{rate:,.4g}" for rate in (figure.median, figure.p20, figure.p80))
        last = "" if percent is None else f"{percent:.1f}%"
        rows.append((figure.name, figure.at, *rates, figure.unit, last))
    return _aligned(rows)


def _contention(groups: Sequence[Contention]) -> list[str]:
    if not groups:
        return []
    rows = [("together", "what is left of each one's rate")]
    for group in groups:
        shares = zip(group.activities, group.shares, strict=True)
        rows.append((" + ".join(group.activities), ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares)))
    return ["", *_aligned(rows)]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
