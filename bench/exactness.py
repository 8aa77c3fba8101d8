"""Trains one model twice, with everything on the device and within a small device budget, and compares every bit.

python bench/exactness.py --model llama-1b --device-memory 6GiB --batch 8 --sequence 2048 --steps 10

Losses of every step and, at the end, every master and moment must agree. Deterministic algorithms are on, because the
usual attention backward adds with atomics and differs from run to run whatever the plan.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import protrain
from protrain.cli.codec import byte_codec
from protrain.cli.data import training_batch
from protrain.cli.models import load_model
from protrain.cli.sources import find_source
from protrain.cli.summary import versions
from protrain.cli.text import tokenize
from protrain.hardware import detect
from protrain.planning import evaluate, pack


def main() -> int:
    """Run both, print and write the record; exit status 1 when a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--device-memory", default="6GiB")
    parser.add_argument("--host-memory")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = run(args, device, None)  # everything persistent
    small = run(args, device, args.device_memory)  # whatever the search finds
    record = {
        "command": f"python bench/exactness.py {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": versions(),
        "model": args.model,
        "batch": args.batch,
        "sequence": args.sequence,
        "steps": args.steps,
        "clip": args.clip,
        "same_losses": whole["losses"] == small["losses"],
        "same_states": whole.pop("digest") == small.pop("digest"),
        "whole": whole,
        "small": small,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0 if record["same_losses"] and record["same_states"] else 1


def run(args: argparse.Namespace, device: str, device_memory: str | None) -> dict[str, Any]:
    """Train once; losses, a digest of all states, time and bytes."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    loaded = load_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        tokens = tokenize(find_source(None).paths, byte_codec(), Path(folder), held_out=0.05)
        size = {"batch": args.batch, "sequence": args.sequence}
        batches = [
            training_batch(tokens, seed=0, step=step, micro_batch=0, **size)["input_ids"] for step in range(args.steps)
        ]
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=loaded.learning_rate, weight_decay=0.1)
    example = {"input_ids": batches[0], "labels": batches[0]}
    model, wrapped = protrain.wrap(
        loaded.model,
        optimizer,
        example_batch=example,
        device=device,
        device_memory=device_memory,
        host_memory=args.host_memory,
        plan=None if device_memory else everything_persistent(loaded.model, optimizer, example, device),
    )
    losses, durations_ms = [], []
    for ids in batches:
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        wrapped.clip_grad_norm_(args.clip)
        wrapped.step()
        wrapped.zero_grad()
        losses.append(loss.item())
        durations_ms.append((time.perf_counter() - start) * 1e3)
    digest = hashlib.blake2b()
    for name in wrapped.parameter_names():
        for key, value in sorted(wrapped.export_parameter(name).items()):
            digest.update(key.encode())
            digest.update(value.numpy().tobytes())
    report = wrapped.report()
    return {
        "device_memory": device_memory,
        "plan": str(wrapped.plan),
        "losses": losses,
        "digest": digest.hexdigest(),
        "step_ms": statistics.median(durations_ms[2:]),
        "device_bytes": report.device_bytes,
        "predicted_device_bytes": report.predicted_device_bytes,
        "host_bytes": report.host_bytes,
    }


def everything_persistent(model: Any, optimizer: torch.optim.Optimizer, example: Any, device: str) -> protrain.Plan:
    """The plan with all states on the device, and blocks checkpointed only if they must be."""
    profile = protrain.profile(model, example, optimizer=optimizer, device=device)
    hardware = detect(device)
    chunks = len(pack(profile).chunks)
    for n_ckpt in (0, len(profile.blocks)):
        with contextlib.suppress(protrain.PlanError):
            return evaluate(profile, hardware, n_persist=chunks, n_buffer=0, n_swap=0, n_ckpt=n_ckpt)
    raise SystemExit("the states of this model do not fit the device whole")


if __name__ == "__main__":
    sys.exit(main())
