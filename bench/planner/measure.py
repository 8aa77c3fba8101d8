"""One plan on the machine: its step time and its memory."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import protrain
from bench.clock import device_timer, durations_ms
from bench.planner.cases import Case
from protrain.cli.models import read_architecture
from protrain.common.errors import BudgetError
from protrain.common.records import Record
from protrain.distributed.joining import local_rank
from protrain.planning import Plan
from protrain.profiler.cache import cached_profile
from protrain.profiler.model_profile import ModelProfile
from protrain.wrapping import change_forwards

_CLIP_NORM = 1e6  # larger than any gradient's norm, as predictions are for steps that are not clipped
WARM_UP = 2  # steps; the first step has nothing to overlap with
_ACCUMULATED_WARM_UP = 1  # of steps that are long, in which the first micro-batch is one of several


@dataclass(frozen=True, kw_only=True)
class Point(Record):
    """A plan and its measurements. If the run failed, bytes are 0 and times empty."""

    plan: Plan
    step_ms: tuple[float, ...]  # of every timed step
    allocated_bytes: int  # the allocator's peak
    reserved_bytes: int  # the allocator's peak with fragmentation
    host_bytes: int  # of the host arena
    host_gparams: float  # the rate in the report, over all updates (in the earliest records the median update's)
    wrap_s: float
    early_updates: int = 0  # speculative updates in all steps, with those before the timed ones
    redone_updates: int = 0  # how many of them were redone
    error: str = ""

    @property
    def median_ms(self) -> float:
        """The median time of the timed steps."""
        return statistics.median(self.step_ms)


def build(case: Case) -> tuple[Any, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A model on the meta device, its optimizer, and a batch of random tokens."""
    loaded = read_architecture(case.shape, layers=case.layers)
    generator = torch.Generator().manual_seed(local_rank())  # ranks train on different rows
    ids = torch.randint(loaded.config.vocab_size, (case.batch, case.sequence), generator=generator)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-4, weight_decay=0.1)
    return loaded.model, optimizer, {"input_ids": ids, "labels": ids}


def profiled(case: Case, device: torch.device) -> ModelProfile:
    """The profile that wrap plans from. If the model is too large to run, it is one that is counted and not run."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def taken(*, on_meta: bool) -> ModelProfile:
        model, optimizer, batch = build(case)
        change_forwards(model, batch, compile=case.compile, chunked_loss=False, on_meta=on_meta)
        traced = torch.device("meta") if on_meta else device
        found = cached_profile(model, batch, optimizer=optimizer, device=traced, dtype=dtype)
        return replace(found, accumulation=case.accumulation)

    with suppress(torch.OutOfMemoryError):
        return taken(on_meta=False)
    return taken(on_meta=True)


class Training:
    """A case under ``plan`` (None: the planner's own), ready to train."""

    def __init__(self, case: Case, plan: Plan | None, device: torch.device) -> None:
        gc.collect()
        model, optimizer, self._batch = build(case)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._clips, self._accumulation = case.clip, case.accumulation
        self.model, self.optimizer = protrain.wrap(
            model,
            optimizer,
            example_batch=self._batch,
            device=device,
            device_memory=case.device_memory,
            host_memory=case.host_memory,
            plan=plan,
            compile=case.compile,
            chunked_loss=False,
            step_during_backward=not case.clip,
            accumulation=case.accumulation,
            progress=False,
        )

    def run(self, steps: int) -> tuple[float, ...]:
        """Milliseconds from the begin of each step to the begin of the next, by the device's own clock."""
        starts = [device_timer()]
        for _ in range(steps):
            for _ in range(self._accumulation):
                output = self.model(**self._batch)  # held until the next output, as plans assume
                (output.loss / self._accumulation).backward()
            if self._clips:
                self.optimizer.clip_grad_norm_(_CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            starts.append(device_timer())
        return durations_ms(starts)


def measure(case: Case, plan: Plan | None, device: torch.device, *, steps: int, traced: Path | None = None) -> Point:
    """Wrap under ``plan`` (None: the planner's own), train, and return the measurements.

    With ``traced`` two more steps are written there, measured beside predicted.
    """
    start = time.perf_counter()
    training = Training(case, plan, device)
    wrap_s, trainer = time.perf_counter() - start, training.optimizer
    warm_up = WARM_UP if case.accumulation == 1 else _ACCUMULATED_WARM_UP
    error = ""
    step_ms: tuple[float, ...] = ()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        step_ms = training.run(warm_up + steps)[warm_up:]
        if traced is not None:
            with protrain.trace(trainer, traced, kernels=False):
                training.run(2)
    except (torch.OutOfMemoryError, BudgetError) as failure:
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    if not error:
        trainer._engine.updates.wait()  # otherwise the report may lack the last step's speculative updates
    report = trainer.report()
    return Point(
        plan=trainer.plan,
        step_ms=step_ms,
        allocated_bytes=report.device_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else report.device_bytes,
        host_bytes=report.host_bytes,
        host_gparams=report.host_gparams,
        wrap_s=wrap_s,
        early_updates=report.speculative_updates,
        redone_updates=report.redone_updates,
        error=error,
    )
