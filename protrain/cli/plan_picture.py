"""A picture of a plan: the timeline of one step."""

from __future__ import annotations

from pathlib import Path

from protrain.planning.timeline import Timeline

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
    for name, end in (
        ("forward", timeline.forward_end_ms),
        ("backward", timeline.backward_end_ms),
        ("after", timeline.step_ms),
    ):
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
