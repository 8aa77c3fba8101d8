"""Traces what really happens in a step beside what was predicted, for Perfetto (ui.perfetto.dev) or chrome://tracing.

The trace has three groups of rows: what torch.profiler sees (kernels by stream, host threads); the engine's own spans
among these, by units and chunks (``protrain.engine.streams.span``); and the planner's timeline of the step.

[Note: measured spans] On a GPU a span begins with the first kernel or copy that was launched inside it, and ends with
the last: torch.profiler shows that as a "gpu_user_annotation" of each stream. On a CPU a span is the time that a thread
was inside it, and so is that of an update in host memory on a GPU. Workers update chunks on threads of their own, so
the profiler looks at all threads.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from protrain.common.errors import MisuseError
from protrain.engine.streams import SPAN
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Models
from protrain.planning.timeline import GPU, HOST, LANES, STREAM, lanes_of

# Process ids in the trace. No process has such a number, nor has a GPU.
_MEASURED, _PREDICTED = 10_000_001, 10_000_002
_LANES = {f"{SPAN}{title}": lane for lane, title in enumerate(LANES)}


@contextmanager
def trace(optimizer: ProTrainOptimizer, path: str | os.PathLike[str], *, kernels: bool = True) -> Iterator[None]:
    """Trace the steps that run inside.

    There should be at least two, so that one overlaps with the updates of the one before. torch.profiler runs inside,
    so a traced step takes longer than others.

    Args:
        optimizer: what ``protrain.wrap`` returned.
        path: a JSON file, written when the body ends. Its folder is made if missing. With several ranks the first
            writes this file, and rank 1 writes one of the same name with "-rank1" behind the stem, and so on.
        kernels: whether to include all that torch.profiler sees, and not only units, copies and updates.

    Raises:
        ValueError: ``optimizer`` is another one.
        OSError: ``path`` cannot be written.
        MisuseError: torch.profiler runs already, as it does inside another trace.
    """
    if not isinstance(optimizer, ProTrainOptimizer):
        raise ValueError(
            f"protrain.trace needs the optimizer that protrain.wrap returned, not a {type(optimizer).__name__}"
        )
    if torch.autograd.profiler._is_profiler_enabled:
        raise MisuseError("protrain.trace while another trace or torch.profiler runs: leave that one first")
    engine, target = optimizer._engine, Path(path)
    if engine.memory.ranks.rank:
        target = target.with_stem(f"{target.stem}-rank{engine.memory.ranks.rank}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.open("a").close()  # what cannot be written is an error before the steps are made
    on_gpu = engine.memory.device.type == "cuda"
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    engine.updates.wait()
    engine.streams.synchronize()
    with profile(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiler:
        yield
        engine.updates.wait()
        engine.streams.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        found = json.loads(Path(folder, "trace.json").read_bytes())
    measured = _measured(found["traceEvents"], on_gpu=on_gpu)
    plan = optimizer.plan
    predicted = Models.of(plan, engine.profile, optimizer.hardware).timeline(plan.block_modes, plan.counts)
    begin_us, advice = _last_forward_us(measured), optimizer.report().advice
    found["traceEvents"] = [
        *(found["traceEvents"] if kernels else ()),
        *_titles(_MEASURED, "measured", lanes_of(optimizer.plan.world_size)),
        *_titles(_PREDICTED, ": ".join(filter(None, ("predicted", advice))), lanes_of(optimizer.plan.world_size)),
        *measured,
        *(
            _span(_PREDICTED, op.lane, op.name, begin_us + op.start_ms * 1e3, (op.end_ms - op.start_ms) * 1e3)
            for op in predicted.operations
        ),
    ]
    target.write_text(json.dumps(found), encoding="utf-8")


def _measured(events: list[dict[str, Any]], *, on_gpu: bool) -> list[dict[str, Any]]:
    """The engine's spans among the ``events`` of torch.profiler, in order. See [Note: measured spans]."""
    found: dict[int, dict[Any, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for event in sorted((each for each in events if "dur" in each), key=lambda event: event["ts"]):
        title, _, name = str(event["name"]).partition(": ")
        lane = _LANES.get(title)
        if lane is None:
            continue
        of_device = on_gpu and lane not in (HOST, STREAM)
        if event["cat"] == ("gpu_user_annotation" if of_device else "user_annotation"):
            row = found[lane][event["tid"] if of_device else None]
            row.append(_span(_MEASURED, lane, name, event["ts"], event["dur"]))
    # What a unit launches on another stream than compute, such as an addition of gradients, is no part of its time.
    return [span for rows in found.values() for span in max(rows.values(), key=len)]


def _last_forward_us(spans: list[dict[str, Any]]) -> float:
    """When the last forward began. It is 0 if there was none."""
    units = [(span["ts"], span["name"].startswith("forward")) for span in spans if span["tid"] == GPU]
    begins_us = [ts for (_, before), (ts, is_forward) in pairwise([(0.0, False), *units]) if is_forward > before]
    return begins_us[-1] if begins_us else 0.0


def _span(process: int, lane: int, name: str, start_us: float, lasts_us: float) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": lane, "name": name, "ts": start_us, "dur": lasts_us}


def _titles(process: int, name: str, lanes: tuple[str, ...]) -> list[dict[str, Any]]:
    titles = [
        ("process_name", 0, {"name": f"ProTrain, {name}"}),
        ("process_sort_index", 0, {"sort_index": process - _PREDICTED - 1}),
    ]
    titles += [("thread_name", lane, {"name": title}) for lane, title in enumerate(lanes)]
    return [{"ph": "M", "pid": process, "tid": lane, "name": kind, "args": args} for kind, lane, args in titles]
