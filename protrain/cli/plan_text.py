"""One step as text: a lane a line, a column for every hundredth of the step, darker where the lane works more."""

from __future__ import annotations

import sys

from protrain.planning.tables import format_ms
from protrain.planning.timeline import Timeline

COLUMNS = 100
_SHADES = " ░▒▓█"
_PLAIN_SHADES = " .:+#"
_PHASES = ("forward", "backward", "after")


def timeline_text(timeline: Timeline, *, plain: bool | None = None) -> str:
    """Ruler, lanes with the share of the step that each works, and the phases; at most 120 characters wide.

    Args:
        timeline: one step.
        plain: ASCII alone; default: when standard output cannot show block characters.
    """
    if plain is None:
        plain = not _shows_blocks()
    shades = _PLAIN_SHADES if plain else _SHADES
    width = max(map(len, timeline.lanes))
    lines = [f"{'':<{width}}  {'0':<{COLUMNS // 2}}{format_ms(timeline.step_ms):>{COLUMNS - COLUMNS // 2}}"]
    for lane, name in enumerate(timeline.lanes):
        shares = busy_shares(timeline, lane)
        cells = "".join(shades[min(len(shades) - 1, int(share * (len(shades) - 1) + 0.75))] for share in shares)
        lines.append(f"{name:<{width}}  {cells}  {sum(shares) / COLUMNS:4.0%}")
    lines.append(f"{'':<{width}}  {_phase_line(timeline)}")
    return "\n".join(lines)


def busy_shares(timeline: Timeline, lane: int) -> list[float]:
    """Per column the part of its time that ``lane`` works, from 0 to 1."""
    column_ms = timeline.step_ms / COLUMNS
    busy = [0.0] * COLUMNS
    for operation in timeline.operations:
        if operation.lane != lane:
            continue
        start, end = max(operation.start_ms, 0.0), min(operation.end_ms, timeline.step_ms)
        for column in range(int(start / column_ms), min(COLUMNS, int(end / column_ms) + 1)):
            busy[column] += max(0.0, min(end, (column + 1) * column_ms) - max(start, column * column_ms))
    return [min(1.0, time_ms / column_ms) for time_ms in busy]


def _phase_line(timeline: Timeline) -> str:
    """Where phases begin and, where there is room, what they are called."""
    ends = [timeline.forward_end_ms, timeline.backward_end_ms, timeline.step_ms]
    stops = [round(end / timeline.step_ms * COLUMNS) for end in ends]
    line = ""
    for name, stop in zip(_PHASES, stops, strict=True):
        room = stop - len(line)
        line += f"|{name}"[:room].ljust(room) if room > len(name) else "|"[:room].ljust(room)
    return line.rstrip()


def _shows_blocks() -> bool:
    try:
        _SHADES.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
