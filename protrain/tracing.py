"""Traces what really happens in a step beside what was predicted, for Perfetto (ui.perfetto.dev) or chrome://tracing.

The trace has three groups of rows: what torch.profiler sees (kernels by stream, host threads), the same by units and
chunks as the planner names them, and the planner's own timeline of the step. The second group is measured with events
around every unit and copy, in addition to the profiler, so a traced step takes longer than others.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.activations.saved import Frame
from protrain.engine.engine import Engine
from protrain.engine.states.chunks import Chunk
from protrain.engine.streams import CudaStreams
from protrain.engine.units import Unit
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning.predict import predict
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, REDUCE, STREAM, UP, Timeline, lanes_of

_MEASURED, _PREDICTED = 1, 2  # process ids in the trace
_tracing: list[_Recorder] = []  # the trace that runs, if one does


@contextmanager
def trace(optimizer: ProTrainOptimizer, path: str | os.PathLike[str], *, kernels: bool = True) -> Iterator[None]:
    """Trace the steps that run inside.

    There should be at least two, so that one overlaps with the updates of the one before.

    Args:
        optimizer: what ``protrain.wrap`` returned.
        path: a JSON file, written when the body ends. Its folder is made if missing. With several ranks the first
            writes this file, and rank 1 writes one of the same name with "-rank1" behind the stem, and so on.
        kernels: whether to include what torch.profiler sees.

    Raises:
        ValueError: ``optimizer`` is another one, or ``path`` is a folder.
        MisuseError: this is inside another trace.
    """
    if not isinstance(optimizer, ProTrainOptimizer):
        raise ValueError(
            f"protrain.trace needs the optimizer that protrain.wrap returned, not a {type(optimizer).__name__}"
        )
    if _tracing:
        raise MisuseError("protrain.trace inside protrain.trace: leave the other one first")
    engine, target = optimizer._engine, Path(path)
    if engine.memory.ranks.rank:
        target = target.with_stem(f"{target.stem}-rank{engine.memory.ranks.rank}")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: give the file to write, such as {target / 'trace.json'}")
    target.parent.mkdir(parents=True, exist_ok=True)
    recorder = _Recorder(engine)
    _tracing.append(recorder)
    try:
        with _profiler(engine.memory.device) if kernels else nullcontext() as profiler, recorder.installed():
            yield
            engine.updates.wait()
            engine.streams.synchronize()
    finally:
        _tracing.clear()
    found = {"traceEvents": []} if profiler is None else _exported(profiler)
    base_us = found.get("baseTimeNanoseconds", 0) / 1e3
    events = recorder.events()
    inside = optimizer.step_during_backward
    predicted = predict(engine.profile, optimizer.hardware, optimizer.plan, step_during_backward=inside)
    events += _predicted_events(predicted.timeline, recorder.last_step_us)
    for event in events:
        if "ts" in event:
            event["ts"] -= base_us
    lanes = lanes_of(optimizer.plan.world_size)
    found["traceEvents"] += [*_names(_MEASURED, "measured", lanes), *_names(_PREDICTED, "predicted", lanes), *events]
    target.write_text(json.dumps(found), encoding="utf-8")


def _profiler(device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def _exported(profiler: torch.profiler.profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "profiler.json"
        profiler.export_chrome_trace(os.fspath(raw))
        found: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8"))
    return found


class _Recorder:
    """Records the times of units, copies and host updates by wrapping methods of the engine while it is installed.

    A time is a CUDA event, or nanoseconds of the host's clock on a CPU and for updates in host memory.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cuda = engine.memory.device.type == "cuda"
        self._spans: list[tuple[int, str, Any, Any]] = []  # lane, name, start and end
        self._jobs: dict[int, list[tuple[str, int, int]]] = {HOST: [], STREAM: []}
        self._last_step: Any = None  # when its forward began
        self._backward: tuple[str, Any] | None = None
        self._gradients_of: int | None = None  # the chunk whose gradients, or sum of them, are being copied
        self._names = {}  # names of weights by their address in host memory
        for chunk in engine.chunks:
            # After a speculative update was committed, uploads read its weight.
            for held in (chunk, chunk.speculative):
                weight: Any = getattr(held, "weight", held)
                if weight is not None:
                    self._names[weight.data_ptr()] = f"weights {chunk.index}"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record inside."""
        engine = self._engine
        engine.streams.synchronize()
        self._anchor, self._anchor_ns = self._stamp(), time.time_ns()
        engine.streams.synchronize()
        patches: dict[tuple[Any, str], Callable[..., Any]] = {
            (engine, "begin_forward"): self._begin_forward,
            (engine, "run_unit"): self._run_unit,
            (engine, "enter_backward"): self._enter_backward,
            (engine, "_leave_unit"): self._leave_unit,
        }
        if isinstance(engine.streams, CudaStreams):
            patches[engine.streams, "_copy"] = self._copy
            for name in ("_add_to_host", "_offload"):
                patches[engine.gradients.reduction, name] = self._of_gradients
        if engine.memory.ranks.several:
            patches[engine.memory.ranks, "gather"] = partial(self._collective, GATHER)
            patches[engine.memory.ranks, "exchange"] = partial(self._collective, REDUCE)
        for (owner, name), function in patches.items():
            vars(owner)[name] = partial(function, getattr(owner, name))
        workers = dict(zip(self._jobs, engine.updates.workers, strict=False))
        for lane, worker in workers.items():
            worker.times = self._jobs[lane]
        try:
            yield
        finally:
            for owner, name in patches:
                del vars(owner)[name]
            for worker in workers.values():
                worker.times = None

    @property
    def last_step_us(self) -> float:
        """When the last forward began, in microseconds since 1970. It is 0 if there was none."""
        return 0.0 if self._last_step is None else self._us(self._last_step)

    def events(self) -> list[dict[str, Any]]:
        """All spans as trace events."""
        found = [_span(_MEASURED, lane, name, self._us(start), self._us(end)) for lane, name, start, end in self._spans]
        for lane, jobs in self._jobs.items():
            found += [_span(_MEASURED, lane, name, start / 1e3, end / 1e3) for name, start, end in jobs if name]
        return found

    def _stamp(self, stream: Any = None) -> Any:
        if not self._cuda:
            return time.time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream) if stream is not None else event.record()
        return event

    def _us(self, stamp: Any) -> float:
        if not self._cuda:
            return float(stamp / 1e3)
        return float(self._anchor_ns / 1e3 + self._anchor.elapsed_time(stamp) * 1e3)

    # Each of the following stands in place of a method of the engine, which is ``original``.

    def _begin_forward(self, original: Callable[[], None]) -> None:
        self._last_step = self._stamp()
        original()

    def _run_unit(self, original: Callable[..., Any], unit: Unit, *rest: Any) -> Any:
        start = self._stamp()
        try:
            return original(unit, *rest)
        finally:
            self._spans.append((GPU, f"forward {unit.label}", start, self._stamp()))

    def _enter_backward(self, original: Callable[[Frame], None], frame: Frame) -> None:
        current = self._engine._current
        original(frame)
        if current is not frame.unit:
            self._backward = (f"backward {frame.unit.label}", self._stamp())

    def _leave_unit(self, original: Callable[[], None]) -> None:
        original()
        if self._backward is not None:
            name, start = self._backward
            self._spans.append((GPU, name, start, self._stamp()))
            self._backward = None

    def _of_gradients(self, original: Callable[..., None], chunk: Chunk, *rest: Any, **options: Any) -> None:
        self._gradients_of = chunk.index
        try:
            original(chunk, *rest, **options)
        finally:
            self._gradients_of = None

    def _collective(self, lane: int, original: Callable[..., None], *arguments: Any) -> None:
        start = self._stamp()  # on the stream of the collective, which is the current one
        original(*arguments)
        self._spans.append((lane, arguments[-1], start, self._stamp()))

    def _copy(
        self, original: Callable[..., None], stream: Any, target: Tensor, source: Tensor, after: Any, done: Any
    ) -> None:
        up = target.is_cuda
        stream.wait_for(after)
        start = self._stamp(stream.stream)
        original(stream, target, source, after, done)
        if self._gradients_of is not None:
            name = f"{'sum' if up else 'gradients'} {self._gradients_of}"
        else:
            name = self._names.get(source.data_ptr(), "activations") if up else "activations"
        self._spans.append((UP if up else DOWN, name, start, self._stamp(stream.stream)))


def _span(process: int, lane: int, name: str, start_us: float, end_us: float) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": lane, "name": name, "ts": start_us, "dur": max(0.0, end_us - start_us)}


def _predicted_events(timeline: Timeline, start_us: float) -> list[dict[str, Any]]:
    return [
        _span(_PREDICTED, op.lane, op.name, start_us + op.start_ms * 1e3, start_us + op.end_ms * 1e3)
        for op in timeline.operations
    ]


def _names(process: int, name: str, lanes: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"ProTrain, {name}"}}]
    rows.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process - 10}})
    rows += [
        {"ph": "M", "pid": process, "tid": lane, "name": "thread_name", "args": {"name": title}}
        for lane, title in enumerate(lanes)
    ]
    return rows
