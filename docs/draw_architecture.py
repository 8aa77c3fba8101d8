"""Draws docs/pictures/architecture.svg: from wrap() to the step. Run as python docs/draw_architecture.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLORS = {"record": "#fff3c4", "package": "#dbeafe", "device": "#dcfce7", "host": "#fde2e2", "plain": "#f3f4f6"}


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, kind: str, bold: bool = False) -> None:
    """A labelled box with its lower left corner at (x, y)."""
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=COLORS[kind], edgecolor="#374151", linewidth=1))
    weight = "bold" if bold else "normal"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, fontweight=weight)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", side: float = 0.12) -> None:
    """An arrow with its label beside the middle."""
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": "#374151", "linewidth": 1.2})
    if text:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(x, y + side, text, ha="center", va="center", fontsize=7.5, color="#374151")


def main() -> None:
    """Draw and save."""
    figure, axes = plt.subplots(figsize=(11, 7.6))
    axes.set_xlim(0, 11)
    axes.set_ylim(0, 7.6)
    axes.axis("off")

    axes.text(0.1, 7.35, "protrain.wrap(model, optimizer, example_batch=batch)", fontsize=11, fontweight="bold")
    box(axes, 0.1, 6.3, 1.5, 0.7, "machine", "plain")
    box(axes, 0.1, 5.2, 1.5, 0.7, "model + batch", "plain")
    box(axes, 2.9, 6.3, 1.8, 0.7, "HardwareProfile", "record", bold=True)
    box(axes, 2.9, 5.2, 1.8, 0.7, "ModelProfile", "record", bold=True)
    box(axes, 6.4, 5.75, 1.7, 0.7, "Plan", "record", bold=True)
    box(axes, 9.2, 5.75, 1.7, 0.7, "Engine", "package", bold=True)
    arrow(axes, (1.6, 6.65), (2.9, 6.65), "hardware/")
    arrow(axes, (1.6, 5.55), (2.9, 5.55), "profiler/")
    arrow(axes, (4.7, 6.65), (6.4, 6.2))
    arrow(axes, (4.7, 5.55), (6.4, 6.0))
    axes.text(5.5, 6.08, "planning/", fontsize=7.5, ha="center", color="#374151")
    arrow(axes, (8.1, 6.1), (9.2, 6.1), "engine/build.py")

    axes.plot([0.1, 10.9], [4.85, 4.85], color="#9ca3af", linewidth=0.8, linestyle="--")
    axes.text(0.1, 4.58, "one training step", fontsize=11, fontweight="bold")

    columns = [(0.1, 2.45), (2.95, 2.45), (5.8, 2.45), (8.65, 2.25)]
    top = [
        ("unit forward\nEngine.run_unit", "package"),
        ("what autograd saves\nFrame, by block mode", "package"),
        ("unit backward\nEngine.enter_backward", "package"),
        ("step()\nUpdates.step", "package"),
    ]
    device = [
        ("persistent chunks,\nchunk buffers", "device"),
        ("NONE: kept\nCKPT: inputs only", "device"),
        ("gradient staging,\nsums of squares", "device"),
        ("AdamW in Triton\non persistent chunks", "device"),
    ]
    host = [
        ("16-bit weights", "host"),
        ("SWAP: activations\nCKPT_SWAP: inputs", "host"),
        ("host_grad,\nfp32 accumulators", "host"),
        ("AdamW in C on the others,\nhost worker", "host"),
    ]
    axes.add_patch(plt.Rectangle((0.0, 0.2), 11.0, 1.25, facecolor="#fff7f7", edgecolor="#9ca3af", linewidth=0.8))
    axes.text(0.1, 0.27, "host memory: one pinned arena", fontsize=7.5, style="italic")
    axes.add_patch(plt.Rectangle((0.0, 1.95), 11.0, 1.2, facecolor="#f7fdf9", edgecolor="#9ca3af", linewidth=0.8))
    axes.text(0.1, 2.0, "device memory", fontsize=7.5, style="italic")
    for (x, width), above, middle, below in zip(columns, top, device, host, strict=True):
        box(axes, x, 3.7, width, 0.7, *above)
        box(axes, x, 2.25, width, 0.75, *middle)
        box(axes, x, 0.52, width, 0.75, *below)
    for (x, width), (following, _) in pairwise(columns):
        arrow(axes, (x + width, 4.05), (following, 4.05))
    labels = [
        ("bound while\nin use", "upload\n(h2d)"),
        ("", "there and back\n(d2h, h2d)"),
        ("flatten", "offload\n(d2h)"),
        ("", ""),
    ]
    for (x, width), (upper, lower) in zip(columns, labels, strict=True):
        middle_x = x + width / 2
        first = x == columns[0][0]
        arrow(axes, *(((middle_x, 3.0), (middle_x, 3.7)) if first else ((middle_x, 3.7), (middle_x, 3.0))))
        arrow(axes, *(((middle_x, 1.27), (middle_x, 2.25)) if first else ((middle_x, 2.25), (middle_x, 1.27))))
        axes.text(middle_x + 0.12, 3.4, upper, fontsize=7.5, va="center", color="#374151")
        axes.text(middle_x + 0.12, 1.7, lower, fontsize=7.5, va="center", color="#374151")
    axes.text(9.9, 1.7, "chunk by chunk, in the\norder of the next forward", fontsize=7.5, va="center", color="#374151")
    target = Path(__file__).parent / "pictures" / "architecture.svg"
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})
    print(target)


if __name__ == "__main__":
    main()
