"""Draws docs/pictures/beside-fsdp2.svg, the bars of the README's table. Run as python docs/draw_comparison.py."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

matplotlib.rcParams["svg.hashsalt"] = "beside-fsdp2"  # the same file from the same records
ROOT = Path(__file__).parents[1]
RECORDS = ["2x2048-fsdp2-placed-usual-host", "8x2048-fsdp2-placed-usual-host", "32x2048-fsdp2-placed"]
figure, axes = plt.subplots(figsize=(7.2, 2.6))
for row, record in enumerate(RECORDS):
    found = json.loads((ROOT / f"bench/results/h100/compare-llama-7b-{record}.json").read_text())["outcomes"]
    for place, (outcome, color) in enumerate(zip(found, ("#2563eb", "#d1d5db"), strict=True)):
        seconds = median(outcome["step_ms"]) / 1000
        name = ("ProTrain", "FSDP2, tuned by hand")[place]
        axes.barh(row + place * 0.38, seconds, 0.36, color=color, label=None if row else name)
        axes.text(seconds + 0.08, row + place * 0.38, f"{seconds:.2f} s", va="center", fontsize=9)
axes.set_yticks([0.19, 1.19, 2.19], ["4,096 tokens", "16,384 tokens", "65,536 tokens"])
axes.invert_yaxis()
axes.set_xlim(0, 9.6)
axes.set_xlabel("seconds a step: 7.24 B LLaMA shape, one H100, all parameters trained")
axes.legend(frameon=False, fontsize=9)
axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
figure.savefig(ROOT / "docs/pictures/beside-fsdp2.svg", metadata={"Date": None})
