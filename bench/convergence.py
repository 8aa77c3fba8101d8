"""Trains a model with Adam's moments in fp32 and in bf16, from several seeds, and compares the losses.

python -m bench.convergence --model tiny --steps 2000 --batch 4 --sequence 128 --seeds 3 --out bench/results/cpu

Three kinds: moments in fp32, moments in bf16 as ``wrap(moment_dtype="bfloat16")`` has them, rounded at random, and as a
control moments that are rounded to the nearest bf16 after every step. beta2 is torch's 0.999, with which those stand
still. One seed has the same weights and batches in every kind, so what differs between kinds is to be held against what
differs between seeds. Writes ``convergence.json`` and ``convergence.png``.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import protrain
from bench.train.task import python_sources, windows
from protrain.cli.models import read_architecture
from protrain.cli.options import whole, writable_folder
from protrain.cli.summary import device_name, versions
from protrain.common.progress import stage
from protrain.optim.optimizer import ProTrainOptimizer

KINDS = ("float32", "bfloat16", "bfloat16, to nearest")
_HELD_OUT = 32  # batches
_SHOWN = 50  # steps that a point of the picture is the mean of


def main(argv: list[str] | None = None) -> int:
    """Train every kind from every seed; print and write the record."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--seeds", type=whole(1), default=3)
    parser.add_argument("--learning-rate", type=float, help="at its peak (default: the model's)")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--out", type=writable_folder, help="folder for convergence.json and convergence.png")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs: list[dict[str, Any]] = []
    with stage("training") as show:
        text = python_sources()
        for seed in range(args.seeds):
            for kind in KINDS:
                show(f"seed {seed}, {kind}")
                runs.append({"seed": seed, "kind": kind, **train(args, text, kind, seed, device)})
            record = {  # after every seed, so that a run that is cut off leaves what it has
                "command": f"python -m bench.convergence {shlex.join(arguments)}",
                "device": device_name(device),
                "versions": versions(),
                "options": {name: value for name, value in vars(args).items() if name != "out"},
                "seeds": seed + 1,
                "held_out": {kind: summary([run["held_out"] for run in runs if run["kind"] == kind]) for kind in KINDS},
                "beyond_float32": {kind: differences(runs, kind) for kind in KINDS[1:]},
                "runs": runs,
            }
            save(record, args.out)
    print(json.dumps({name: value for name, value in record.items() if name != "runs"}, indent=1))
    return 0


def save(record: dict[str, Any], folder: Path | None) -> None:
    """The record and its picture."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "convergence.json").write_text(json.dumps(record) + "\n")
        draw(record["runs"], folder / "convergence.png")


def summary(losses: list[float]) -> dict[str, float]:
    """Mean and spread over seeds."""
    return {"mean": statistics.mean(losses), "least": min(losses), "most": max(losses)}


def differences(runs: list[dict[str, Any]], kind: str) -> dict[str, float | None]:
    """How much more held-out loss than moments in fp32, seed by seed: mean, and its standard error if it has one."""
    by_seed = {(run["seed"], run["kind"]): run["held_out"] for run in runs}
    found = [loss - by_seed[seed, KINDS[0]] for (seed, other), loss in by_seed.items() if other == kind]
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
    return {"mean": statistics.mean(found), "standard_error": error}


def train(
    args: argparse.Namespace, text: NDArray[np.uint8], kind: str, seed: int, device: torch.device
) -> dict[str, Any]:
    """Loss of every step, and of held-out text at the end."""
    torch.manual_seed(seed)
    loaded = read_architecture(args.model)
    model = loaded.model
    peak = args.learning_rate or loaded.learning_rate
    plain = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, args.beta2), weight_decay=0.1)
    size = {"batch": args.batch, "sequence": args.sequence}
    trained, held_back = np.split(text, [len(text) * 49 // 50])
    first = windows(trained, seed=seed, **size).to(device)
    model, optimizer = protrain.wrap(
        model,
        plain,
        example_batch={"input_ids": first, "labels": first},
        device=device,
        moment_dtype="bfloat16" if kind == "bfloat16" else "float32",
        progress=False,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, args.steps))
    losses = []
    for step in range(args.steps):
        ids = windows(trained, seed=seed * args.steps + step, **size).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if kind == "bfloat16, to nearest":
            to_nearest(optimizer)
    model.eval()
    with torch.no_grad():
        held_out = [
            model(input_ids=ids, labels=ids).loss.item()
            for ids in (windows(held_back, seed=number, **size).to(device) for number in range(_HELD_OUT))
        ]
    return {"held_out": statistics.mean(held_out), "plan": str(optimizer.plan), "losses": losses}


def _factor(step: int, steps: int) -> float:
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def to_nearest(optimizer: ProTrainOptimizer) -> None:
    """Round every moment to the nearest bf16, where it lies: one by one they would take longer than the step."""
    engine = optimizer._engine
    with engine.quiet():
        for chunk in engine.chunks:
            for moment in (chunk.exp_avg, chunk.exp_avg_sq):
                if moment is not None:
                    moment.copy_(moment.bfloat16())


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Training loss of every run, smoothed: one colour a kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        losses = run["losses"]
        steps = range(0, len(losses) - _SHOWN + 1, _SHOWN)
        means = [statistics.mean(losses[first : first + _SHOWN]) for first in steps]
        label = run["kind"] if run["seed"] == 0 else None
        color = f"C{KINDS.index(run['kind'])}"
        axes.plot([first + _SHOWN / 2 for first in steps], means, color=color, linewidth=0.8, label=label)
    axes.set(xlabel="step", ylabel="training loss", title="Adam's moments in fp32, and in bf16 rounded in two ways")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
