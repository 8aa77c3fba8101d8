"""The bar chart: tokens/s of every contestant that ran."""

from __future__ import annotations

from pathlib import Path

from bench.train.results import Comparison


def draw_bars(comparison: Comparison, path: Path) -> None:
    """A PNG. ImportError when matplotlib is not installed; nothing when nobody ran."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colors = {"protrain": "tab:blue", "floor": "tab:gray"}
    ran = [outcome for outcome in comparison.outcomes if not outcome.error]
    if not ran:
        return
    ran.sort(key=comparison.tokens_per_s)
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(ran)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.barh(
        [outcome.contestant.title for outcome in ran],
        [comparison.tokens_per_s(outcome) for outcome in ran],
        color=[colors.get(outcome.contestant.kind, "tab:orange") for outcome in ran],
    )
    axes.bar_label(bars, [f"{comparison.tokens_per_s(outcome):,.0f}" for outcome in ran], padding=3)
    axes.margins(x=0.12)
    axes.set(xlabel="tokens/s")
    figure.suptitle(comparison.headline(), fontsize=9)
    figure.savefig(path, dpi=120)
