"""Runs of `protrain train` on a CPU: the command line, and what a run is compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def command(**options: Any) -> list[str]:
    """The command line with ``options``, and with those that all these runs have."""
    every = {
        "device": "cpu",
        "learning_rate": 0.01,
        "evaluate_every": 2,
        "checkpoint_every": 0,
        "threads": 1,
        **options,
    }
    words = [(f"--{name.replace('_', '-')}", str(value)) for name, value in every.items()]
    return ["train", *(word for pair in words for word in pair)]


def outcome(folder: Path) -> dict[str, Any]:
    """What must not depend on how a step is divided: the numbers of all steps, the weights and the sample."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "gradient_norm", "learning_rate", "evaluation_loss")
    return {
        "rows": [{name: row[name] for name in kept if name in row} for row in rows],
        "weights": (folder / "model" / "model.safetensors").read_bytes(),
        "sample": (folder / "sample.txt").read_text(),
    }
