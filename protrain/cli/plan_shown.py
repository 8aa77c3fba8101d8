"""What `protrain plan` shows: an answer in ten lines, and one step as text and as a picture.

As text a step has a lane a line, in columns of equal time, darker where the lane works more.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from protrain.common.tables import WIDTH, aligned, format_bytes, format_ms, per_gpu
from protrain.planning import Answer, prose
from protrain.planning.timeline import Timeline

_LEAST_COLUMNS = 20
_SHADES = " ░▒▓█"
_COLORS = {
    "forward": "tab:blue",
    "backward": "tab:purple",
    "flatten": "tab:gray",
    "speculative update": "tab:pink",
    "speculative weight": "tab:pink",
    "update": "tab:red",
    "deferred update": "tab:brown",
    "weights": "tab:green",
    "activations": "tab:orange",
    "gradients": "tab:olive",
    "sum": "darkkhaki",
    "gather": "lightgreen",
    "reduce": "gold",
}


def summary_text(answer: Answer) -> str:
    """What a reader who stops after ten lines should know."""
    n_gpus = answer.machine.gpus
    if answer.plan is None:
        return aligned([["lacks", f"{format_bytes(answer.lacks_bytes)} of {per_gpu(answer.lacks, n_gpus)}"]])
    plan, slower = answer.plan, answer.on_slower_host()
    device = "GPU" if answer.machine.device_type == "cuda" else "device"
    basis = "estimated from counted operations, not measured" if answer.estimated else "predicted"
    used = [format_bytes(size) for size in (plan.device_bytes, plan.host_bytes)]
    rows = [
        ["step", f"{answer.speed} ({basis}){slower and '; '}{slower}"],
        [str(answer.job), answer.job.bill(plan.tokens_per_s, n_gpus)],
        [per_gpu("batch", n_gpus), f"{prose.counted(answer.n_sequences, 'sequence')} x {answer.accumulation} a step"],
        [f"{device} memory", f"{used[0]} of {format_bytes(answer.machine.device_bytes)}"],
        [per_gpu("host memory", n_gpus), f"{used[1]} of the {format_bytes(answer.machine.host_bytes)} for training"],
        ["collectives", ", ".join(f"{what} {rate}" for what, rate in answer.machine.collectives.items())],
        ["model states", prose.states(plan, answer.large_buffers, device)],
        ["updates", prose.updates(plan, device, answer.updates_in_backward)],
        ["activations", prose.activations(plan)],
        ["limited by", prose.limits(answer.phases, device)],
        ["plan", str(plan)],
    ]
    return aligned([row for row in rows if row[1]], WIDTH)


def timeline_text(timeline: Timeline) -> str:
    """Ruler, lanes with the share of the step that each works, and the phases; as wide as the terminal, at most 80."""
    width = max(map(len, timeline.lanes.values()))
    screen = shutil.get_terminal_size(fallback=(WIDTH, 1)).columns
    columns = max(_LEAST_COLUMNS, min(WIDTH, screen) - width - len("    100%"))
    lines = [f"{'':<{width}}  {'0':<{columns // 2}}{format_ms(timeline.step_ms):>{columns - columns // 2}}"]
    for lane, name in timeline.lanes.items():
        shares = busy_shares(timeline, lane, columns)
        cells = "".join(_SHADES[min(len(_SHADES) - 1, int(share * (len(_SHADES) - 1) + 0.75))] for share in shares)
        lines.append(f"{name:<{width}}  {cells}  {sum(shares) / columns:4.0%}")
    lines.append(f"{'':<{width}}  {_phase_line(timeline, columns)}")
    return "\n".join(lines)


def busy_shares(timeline: Timeline, lane: int, columns: int) -> list[float]:
    """Per column the part of its time that ``lane`` works, from 0 to 1."""
    column_ms = timeline.step_ms / columns
    busy = [0.0] * columns
    for operation in timeline.operations:
        if operation.lane != lane:
            continue
        start, end = max(operation.start_ms, 0.0), min(operation.end_ms, timeline.step_ms)
        for column in range(int(start / column_ms), min(columns, int(end / column_ms) + 1)):
            busy[column] += max(0.0, min(end, (column + 1) * column_ms) - max(start, column * column_ms))
    return [min(1.0, time_ms / column_ms) for time_ms in busy]


def _phase_line(timeline: Timeline, columns: int) -> str:
    """Where phases begin and, where there is room, what they are called."""
    line = ""
    for name, end_ms in _phase_ends_ms(timeline).items():
        room = round(end_ms / timeline.step_ms * columns) - len(line)
        line += f"|{name}"[:room].ljust(room) if room > len(name) else "|"[:room].ljust(room)
    return line.rstrip()


def _phase_ends_ms(timeline: Timeline) -> dict[str, float]:
    return {"forward": timeline.forward_end_ms, "backward": timeline.backward_end_ms, "after": timeline.step_ms}


def draw_timeline(timeline: Timeline, title: str, path: Path) -> None:
    """Lanes below each other, every operation a bar in the color of its kind, phases marked."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = timeline.lanes
    heights = {lane: len(lanes) - 1 - at for at, lane in enumerate(lanes)}
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    axes = figure.add_subplot()
    seconds, unit = (1e3, "s") if timeline.step_ms >= 1e3 else (1.0, "ms")
    kinds: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for operation in timeline.operations:
        start, end = max(operation.start_ms, 0.0), min(operation.end_ms, timeline.step_ms)
        if end > start:
            kind = next(kind for kind in _COLORS if operation.name.startswith(kind))
            kinds.setdefault((operation.lane, kind), []).append((start / seconds, (end - start) / seconds))
    for (lane, kind), bars in kinds.items():
        # A thin white edge tells neighbours apart; of hundreds it would be all there is to see.
        edge = {"edgecolor": "white", "linewidth": 0.4} if len(bars) < 120 else {"linewidth": 0}
        axes.broken_barh(bars, (heights[lane] - 0.4, 0.8), facecolors=_COLORS[kind], **edge)
    begin = 0.0
    for name, end in _phase_ends_ms(timeline).items():
        axes.axvline(end / seconds, color="black", linewidth=0.8, linestyle="--")
        if end - begin > 0.05 * timeline.step_ms:
            axes.text((begin + end) / 2 / seconds, len(lanes) - 0.45, name, ha="center", va="bottom")
        begin = end
    axes.set_yticks(list(heights.values()), list(lanes.values()))
    axes.set(xlim=(0, timeline.step_ms / seconds), ylim=(-0.6, len(lanes) - 0.1), xlabel=f"time, {unit}")
    axes.set_title(title, fontsize=10)
    shown = [kind for kind in _COLORS if any(kind == found for _, found in kinds)]
    handles = [Patch(color=_COLORS[kind], label=kind) for kind in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(shown), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
