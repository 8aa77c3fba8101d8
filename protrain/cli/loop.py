"""The training loop of `protrain train`: plain PyTorch around protrain.wrap, plus saving, resuming and reporting."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import protrain
from protrain.cli.data import training_batch
from protrain.cli.finish import finish
from protrain.cli.job import STEPS_WITH_TRACE, TrainJob
from protrain.cli.metrics import DelayedRead, ProgressLine, StepResult, StepTimes, resident_bytes, status_line
from protrain.cli.prepare import prepare, schedule
from protrain.cli.run import Run
from protrain.cli.summary import TrainSummary

_WARMING_UP_STEPS = 5  # left out of reported times: allocators grow, caches fill
_TRACED_FROM = STEPS_WITH_TRACE - 2  # steps into the run


class InterruptedRun(Exception):
    """The run was told to stop and has saved itself."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def train(job: TrainJob, folder: Path, *, resume: bool) -> TrainSummary:
    """Train as ``job`` says and leave everything in ``folder``.

    Raises:
        ValueError: The job cannot be done: model, data, memory, device or checkpoint; says which and what to change.
        InterruptedRun: SIGINT or SIGTERM arrived; the run is saved.
        FloatingPointError: The loss is not a number.
    """
    run = prepare(job, folder, resume=resume)
    if job.trace and job.steps - run.step < STEPS_WITH_TRACE:
        raise ValueError(f"--trace needs {STEPS_WITH_TRACE} steps, and {job.steps - run.step} of {folder} are left")
    times = StepTimes(skip=_WARMING_UP_STEPS)
    line = ProgressLine("training", job.steps, done=run.step)
    with stop_requests() as requested, line, ExitStack() as tracing:
        if resume:
            line.note(f"resumed at step {run.step}")
        report = _reporter(run, times, line)
        delayed = DelayedRead(run.device)
        first_step = run.step
        while run.step < job.steps:
            if job.trace and run.step == first_step + _TRACED_FROM:
                tracing.enter_context(protrain.trace(run.optimizer, job.trace))
            loss, norm = _step(run)
            if job.trace and run.step == first_step + _TRACED_FROM + 2:
                tracing.close()
                times.pause()
                line.note(f"steps {run.step - 1} and {run.step} traced: {job.trace}")
            # The step before is read here, while this one runs.
            report(delayed.take())
            delayed.put(run.step, loss, norm)
            last, stop = run.step == job.steps, requested()
            evaluate = not (last or stop) and job.evaluate_every and run.step % job.evaluate_every == 0
            save = stop or (job.checkpoint_every and (last or run.step % job.checkpoint_every == 0))
            if evaluate or save or last:
                report(delayed.take())
                times.pause()
            if evaluate:
                run.evaluate()
            if save:
                line.note(f"saved {run.save()}")
            if stop:
                again = f"protrain train --resume --folder {shlex.quote(str(folder))}"
                raise InterruptedRun(stop, f"stopped at step {run.step} of {job.steps}; continue with: {again}")
    return finish(run, times)


def _step(run: Run) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One optimizer step; returns its mean loss and gradient norm, both still on the device."""
    job = run.job
    total = torch.zeros((), device=run.device)
    for micro_batch in range(job.accumulation):
        ids = training_batch(
            run.tokens,
            seed=job.seed,
            step=run.step,
            micro_batch=micro_batch,
            batch=job.batch,
            sequence=run.sequence,
        )
        with nullcontext() if micro_batch == job.accumulation - 1 else run.model.no_sync():
            loss = run.loss(ids) / job.accumulation
            run.optimizer.backward(loss)
        total += loss.detach()
    norm = run.optimizer.clip_grad_norm_(job.clip) if job.clip else None
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    run.step += 1
    return total, norm


def _reporter(run: Run, times: StepTimes, line: ProgressLine) -> Callable[[StepResult | None], None]:
    """Turns a finished step into a row of metrics.jsonl and a progress line."""
    factor = schedule(run.job)
    peak_learning_rate = run.job.peak_learning_rate(run.loaded.learning_rate)

    def report(result: StepResult | None) -> None:
        if result is None:
            return
        if not math.isfinite(result.loss):
            raise FloatingPointError(
                f"the loss is {result.loss} at step {result.step}; lower --learning-rate, or lengthen --warmup"
            )
        step_ms = times.add(result.ended_s)
        tokens_per_s = None if step_ms is None else run.tokens_per_step / step_ms * 1000
        tflops = None if tokens_per_s is None else tokens_per_s * run.flops_per_token / 1e12
        memory: dict[str, Any] = {"device_bytes": run.device_peak_bytes, "host_bytes": resident_bytes()}
        run.metrics.add(
            {
                "step": result.step,
                "loss": result.loss,
                "gradient_norm": result.gradient_norm,
                "learning_rate": peak_learning_rate * factor(result.step - 1),
                "step_ms": step_ms,
                "tokens_per_s": tokens_per_s,
                "model_tflops": tflops,
                **memory,
            }
        )
        status = status_line(loss=result.loss, tokens_per_s=tokens_per_s, tflops=tflops, **memory)
        plain = result.step in (1, run.job.steps) or result.step % run.job.log_every == 0
        line.update(result.step, status, plain=plain)

    return report


@contextmanager
def stop_requests() -> Iterator[Callable[[], int]]:
    """Yields a function that gives the signal which asked the run to stop, or 0; a second one stops at once."""
    received = 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = number

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
