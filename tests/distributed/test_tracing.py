"""A trace of several ranks: each has a file, with the gathers and reductions of its steps."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

import protrain
from tests.distributed.pool import on_ranks
from tests.distributed.test_bits import batches, make
from tests.engine.harness import NONE, Spec, adamw, default_loss, wrap_under


def traced(rank: int, folder: Path) -> int:
    """Two traced steps. Returns the number of chunks."""
    model = functools.partial(make, "gpt2")()
    data = batches(4)[rank::2]
    wrapped, optimizer = wrap_under(
        Spec("none", "all", (NONE,)), model, adamw(model), data[0], device=torch.device("cpu"), world_size=2
    )
    with protrain.trace(optimizer, folder / "trace.json", kernels=False):
        for batch in data:
            default_loss(wrapped, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer.plan.n_chunks


def test_gathers_and_reductions_of_each_rank(tmp_path: Path) -> None:
    counts = on_ranks(2, traced, tmp_path)
    for name, n_chunks in zip(("trace.json", "trace-rank1.json"), counts, strict=True):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        pid = next(event["pid"] for event in events if event.get("args") == {"name": "ProTrain, measured"})
        measured = [event["name"] for event in events if event["pid"] == pid and event["ph"] == "X"]
        for chunk in range(n_chunks):
            assert measured.count(f"gather {chunk}") == 2, "with buffers for all chunks: once a step"
            assert f"reduce {chunk}" in measured
        titles = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == pid]
        assert titles[-2:] == ["gathers", "reductions"]
