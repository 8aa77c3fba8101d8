"""Predicted against measured: time with the paper's formula beside ours, and device memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.planner.results import GIB, CaseResult


def draw_scatter(results: Sequence[CaseResult], path: Path) -> None:
    """A PNG with two panels. Raises ImportError if matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5))
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2)
    for held_out, color, label in ((False, "tab:blue", "tuned"), (True, "tab:orange", "held out")):
        pairs = [
            (point, result.predict(point.plan))
            for result in results
            if result.case.held_out is held_out
            for point in result.points
            if not point.error
        ]
        if not pairs:
            continue
        measured = [point.median_ms / 1e3 for point, _ in pairs]
        time.scatter(measured, [found.paper_ms / 1e3 for _, found in pairs], s=16, color=color, marker="x", alpha=0.4)
        time.scatter(measured, [found.step_ms / 1e3 for _, found in pairs], s=16, color=color, label=label)
        memory.scatter(
            [point.allocated_bytes / GIB for point, _ in pairs],
            [found.device_bytes / GIB for _, found in pairs],
            s=16,
            color=color,
            label=label,
        )
    for axes, unit, title in (
        (time, "s", "one step (x: the paper's formula)"),
        (memory, "GiB", "peak device memory"),
    ):
        axes.set(xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}", title=title, xscale="log", yscale="log")
        limits = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
        axes.plot(limits, limits, color="grey", linewidth=0.8)
        axes.set(xlim=limits, ylim=limits)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
