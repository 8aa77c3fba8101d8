"""Results as people and programs read them: a table, JSON, CSV, and a roofline picture of every operator."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.kernels.roofs import NO_ROOF, PRODUCTS
from bench.kernels.rows import OURS, Row
from protrain.common.tables import format_bytes
from protrain.hardware.datasheet import of_card

_NOTHING = "-"
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("implementation", lambda row: f"{row.implementation} {row.version}".strip()),
    ("median (p20-p80) ms", lambda row: _times(row)),
    ("GB/s", lambda row: _number(row.gbps, "{:,.0f}")),
    ("of roof", lambda row: _number(row.percent_of_roof, "{:.1f}%")),
    ("of datasheet", lambda row: _number(row.percent_of_datasheet, "{:.1f}%")),
    ("over eager", lambda row: _number(row.speedup_over_eager, "{:.2f}x")),
    ("over compile", lambda row: _number(row.speedup_over_compile, "{:.2f}x")),
    ("over best peer", lambda row: _number(row.speedup_over_best_peer, "{:.2f}x")),
    ("host us", lambda row: _number(row.host_us, "{:.0f}")),
    ("extra memory", lambda row: _NOTHING if row.extra_memory_bytes is None else format_bytes(row.extra_memory_bytes)),
    ("verdict", lambda row: row.verdict),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, a paragraph for every operator, shape and type. A column without values is left out."""
    columns = {name: [value(row) for row in rows] for name, value in _COLUMNS}
    columns = {name: column for name, column in columns.items() if set(column) != {_NOTHING}}
    widths = [max(map(len, (name, *column))) for name, column in columns.items()]
    lines = []
    group = None
    for row, texts in zip(rows, zip(*columns.values(), strict=True), strict=True):
        if row.group != group:
            group = row.group
            size = f"{format_bytes(row.bytes)} to move, limited by {row.roof}" if row.bytes else NO_ROOF
            lines += ["", f"{row.operator}: {row.shape}, {row.dtype}; {size}"]
            lines.append("  " + _joined(list(columns), widths))
        lines.append("  " + _joined(texts, widths))
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines[1:])


def summary(rows: Sequence[Row]) -> str:
    """What the rows come to in one or two lines, the machine among them."""
    machine = rows[0].machine
    red = sum(row.red for row in rows)
    timed = sum(row.median_ms is not None for row in rows)
    verdicts = f"{len(rows) - red} of {len(rows)} correct"
    if machine.gpu == "none":
        figures = "no CUDA device on this machine: correctness was checked, nothing was timed"
    else:
        figures = f"{timed} timed on {machine.gpu} (driver {machine.driver})"
    versions = f"torch {machine.torch}, triton {machine.triton}, commit {machine.commit}"
    return f"{verdicts}; {figures}\n{versions}; {machine.cpu}"


def write_json(rows: Sequence[Row], path: Path) -> None:
    """All rows to ``path``."""
    path.write_text(json.dumps([row.flat() for row in rows], indent=1) + "\n")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All rows to ``path``, with a header."""
    flat = [row.flat() for row in rows]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def write_results(rows: Sequence[Row], folder: Path) -> list[Path]:
    """kernels.json, kernels.csv, and, with matplotlib, a picture for every operator that was timed.

    Returns what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "kernels.json", folder / "kernels.csv"]
    write_json(rows, written[0])
    write_csv(rows, written[1])
    for operator in dict.fromkeys(row.operator for row in rows):
        timed = [row for row in rows if row.operator == operator and row.median_ms is not None and row.bytes]
        if timed and can_draw():
            slug = re.sub(r"[^a-z0-9]+", "-", operator.lower()).strip("-")
            written.append(folder / f"roofline-{slug}.png")
            draw_roofline(timed, written[-1])
    return written


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_roofline(rows: Sequence[Row], path: Path) -> None:
    """Draw timed rows of one operator: its roofline, and the rate it reaches by size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{rows[0].operator} on {rows[0].machine.gpu}")
    computing, rates = figure.subplots(1, 2)
    _draw_computing(computing, rows)
    for implementation in dict.fromkeys(row.implementation for row in rows):
        own = sorted((row for row in rows if row.implementation == implementation), key=lambda row: row.bytes)
        style = {"linewidth": 2, "zorder": 3} if implementation == OURS else {"linewidth": 1, "alpha": 0.8}
        rates.plot([row.bytes for row in own], [row.gbps for row in own], "o-", label=implementation, **style)
    for label, value, line in _ceilings(rows):
        rates.axhline(value, color="gray", linestyle=line, label=label)
    rates.set(xscale="log", xlabel="bytes that the operator has to move", ylabel="GB/s")
    rates.set_ylim(bottom=0)
    rates.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_computing(axes: object, rows: Sequence[Row]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    counted = [row for row in rows if row.flops]
    if not counted:
        axes.text(0.5, 0.5, "moves data alone:\nno arithmetic, so no intensity", ha="center", va="center")
        axes.set_axis_off()
        return
    sheet = of_card(counted[0].machine.gpu)
    peak = sheet.fp32_tflops if sheet is not None and counted[0].roof == "device copy" else None
    intensities = [row.flops / row.bytes for row in counted]
    reach = [min(intensities) / 4, max(*intensities, peak * 1e3 / (counted[0].roof_gbps or 1) if peak else 0) * 4]
    for label, gbps, line in _ceilings(counted):
        axes.plot(reach, [min(x * gbps / 1e3, peak or float("inf")) for x in reach], color="gray", linestyle=line)
        axes.annotate(label, (reach[0], reach[0] * gbps / 1e3), fontsize="x-small", rotation=30)
    if peak:
        axes.axhline(peak, color="gray", linewidth=0.5)
        axes.annotate("fp32, datasheet", (reach[0], peak), fontsize="x-small", va="bottom")
    for implementation in dict.fromkeys(row.implementation for row in counted):
        own = [row for row in counted if row.implementation == implementation]
        tflops = [row.flops / (row.median_ms or 1.0) / 1e9 for row in own]
        axes.plot([row.flops / row.bytes for row in own], tflops, "o", label=implementation)
    axes.set(xscale="log", yscale="log", xlabel="floating-point operations a byte", ylabel="TFLOP/s")


def _ceilings(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    found = []
    if rows[0].roof_gbps and rows[0].roof != PRODUCTS:  # which are another roof for each shape
        found.append((f"{rows[0].roof}, measured", rows[0].roof_gbps, "--"))
    if rows[0].datasheet_gbps:
        found.append(("datasheet", rows[0].datasheet_gbps, ":"))
    return found


def _times(row: Row) -> str:
    if row.median_ms is None or row.p20_ms is None or row.p80_ms is None:
        return _NOTHING
    return f"{row.median_ms:.4g} ({row.p20_ms:.4g}-{row.p80_ms:.4g})"


def _number(value: float | None, pattern: str) -> str:
    return _NOTHING if value is None else pattern.format(value)


def _joined(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()
