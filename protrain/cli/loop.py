"""The training loop of `protrain train`: plain PyTorch around protrain.wrap, with saving, resuming and reporting."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

import protrain
from protrain.checkpoint.manifest import list_saves
from protrain.cli.data import counted_in, counted_tokens, training_batch
from protrain.cli.finish import discard_unfinished, finish
from protrain.cli.job import TrainJob
from protrain.cli.metrics import (
    DelayedRead,
    ProgressLine,
    StepResult,
    StepTimes,
    added_in_order,
    resident_bytes,
)
from protrain.cli.prepare import prepare, schedule, write_run_files
from protrain.cli.run_files import CHECKPOINTS
from protrain.cli.summary import TrainSummary
from protrain.cli.training_run import Run
from protrain.common.errors import MisuseError
from protrain.common.progress import note
from protrain.common.signals import InterruptedRun, Stopped, StopRequests
from protrain.forward.module_state import seed_of

_STEPS_WITH_TRACE = 5  # three steps that warm up, and two that are traced
_TRACED_FROM = _STEPS_WITH_TRACE - 2  # the number of steps before the traced ones

# Takes the numbers of a step on this rank, its loss over all ranks, and its time if it stood alone.
Report = Callable[[StepResult, float, float | None], None]


def train(job: TrainJob, folder: Path, requests: StopRequests, *, trace: Path | None = None) -> TrainSummary:
    """Train as ``job`` says and leave everything in ``folder``. Two steps are traced into the file ``trace``, if given.

    Raises:
        ValueError: The job cannot be done; the message says which of model, data, memory, device or checkpoint is wrong
            and what to change.
        InterruptedRun: SIGINT, SIGTERM or SIGHUP arrived. The run is saved, or had not begun, or they came twice.
        FloatingPointError: The loss is not a number.
    """
    if trace and job.steps < _STEPS_WITH_TRACE:
        raise ValueError(f"--trace needs {_STEPS_WITH_TRACE} steps, and --steps is {job.steps}")
    try:
        with requests.raised():
            run = prepare(job, folder)
    except Stopped:
        raise InterruptedRun(requests.received, f"stopped before a step was taken: {folder} is as it was") from None
    if trace and job.steps - run.step < _STEPS_WITH_TRACE:
        raise ValueError(
            f"--trace needs {_STEPS_WITH_TRACE} steps, and {job.steps - run.step} of {folder} are left: leave it out"
        )
    write_run_files(run)
    try:
        saved_step = _steps(run, requests, resumed=job.micro_batches is not None, trace=trace)
    except KeyboardInterrupt:  # a second request to stop
        saves = list_saves(folder / CHECKPOINTS)
        since = f"from {saves[-1]}" if saves else "from the start, as nothing was saved yet"
        said = f"stopped at once in step {run.step + 1} of {job.steps}, and not saved; `{_again(run)}` goes on {since}"
        raise InterruptedRun(requests.received, said) from None
    return _finish(run, requests, saved_step)


def _steps(run: Run, requests: StopRequests, *, resumed: bool, trace: Path | None) -> int:
    """Run every step that is left. Returns the step of the newest save, or 0 if there is none."""
    job, times = run.job, StepTimes()
    saved_step = run.step
    with ProgressLine("", job.steps, done=run.step) as line, ExitStack() as tracing:
        if resumed:
            line.note(f"resumed at step {run.step}" if run.step else "nothing was saved yet: starting at step 1")
        report = _reporter(run, times, line)
        delayed = DelayedRead(run.device, run.micro_batches // run.ranks.size)
        first_step = run.step
        while run.step < job.steps:
            if trace and run.writes and run.step == first_step + _TRACED_FROM:
                tracing.enter_context(protrain.trace(run.optimizer, trace))
            losses, norm = _step(run)
            # The loss of the step before is read here, while this step runs. The ranks exchange it, and whether one of
            # them was told to stop.
            stop = _exchange(run, requests, delayed.take(), report)
            delayed.put(run.step, losses, norm)
            last = run.step == job.steps
            evaluate = not (last or stop) and job.evaluate_every and run.step % job.evaluate_every == 0
            save = stop or (job.checkpoint_every and (last or run.step % job.checkpoint_every == 0))
            traced = trace and run.step == first_step + _TRACED_FROM + 2
            pause = evaluate or save or traced or last
            if pause:
                result, alone_ms = delayed.take(), None
                if times.is_alone:
                    run.wait_for_updates()
                    alone_ms = times.alone_ms(time.perf_counter())
                _exchange(run, requests, result, report, alone_ms)
                times.pause()
            if traced:
                tracing.close()
                line.note(f"steps {run.step - 1} and {run.step} traced: {trace}")
            if evaluate:
                run.evaluate()
            if save:
                line.note(f"saved {_saved(run, saved_step)}")
                saved_step = run.step
            if pause:
                times.go_on(time.perf_counter())
            if stop:
                raise _interrupted(run, stop)
    return saved_step


def _exchange(
    run: Run, requests: StopRequests, result: StepResult | None, report: Report, alone_ms: float | None = None
) -> int:
    """Report the ``result`` of this rank together with those of all others.

    Returns:
        The signal that told one of the ranks to stop, or 0. It is the same on all ranks, so they stop after one step.
    """
    every = run.ranks.all_values((requests.received, () if result is None else result.losses))
    if result is not None:
        report(result, added_in_order([losses for _, losses in every]), alone_ms)
    return max(signal_number for signal_number, _ in every)


def _saved(run: Run, saved_step: int) -> Path:
    """Save the run. If that fails, the OSError says how to go on from ``saved_step``."""
    try:
        return run.save()
    except OSError as error:
        since = f"from step {saved_step}" if saved_step else "from the start, as nothing was saved yet"
        raise OSError(
            f"step {run.step} is not saved: {error}; make room, then `protrain train --resume --folder {run.folder}` "
            f"goes on {since}"
        ) from error


def _finish(run: Run, requests: StopRequests, saved_step: int) -> TrainSummary:
    """Do what follows the last step. If that ends early, the run is saved, and resuming does the rest.

    Several ranks would be out of step if a signal raised in the middle of what they do together. They look between the
    stages whether there was one.
    """

    def look() -> None:
        if run.ranks.several and _told_to_stop(run, requests):
            raise Stopped

    try:
        with nullcontext() if run.ranks.several else requests.raised():
            return finish(run, look)
    except (Stopped, Exception) as error:
        try:
            run.ranks.meet("the save after a failure")
        except MisuseError:  # this rank alone has failed, and a save takes all of them
            raise error from None
        if run.writes:
            discard_unfinished(run.folder)
        if saved_step != run.step:
            note(f"saved {_saved(run, saved_step)}")
        if isinstance(error, Stopped):
            raise _interrupted(run, _told_to_stop(run, requests)) from None
        raise


def _told_to_stop(run: Run, requests: StopRequests) -> int:
    """The signal that told one of the ranks to stop, or 0."""
    return max(run.ranks.all_values(requests.received))


def _interrupted(run: Run, number: int) -> InterruptedRun:
    return InterruptedRun(number, f"stopped at step {run.step} of {run.job.steps}; continue with: {_again(run)}")


def _again(run: Run) -> str:
    return f"protrain train --resume --folder {shlex.quote(str(run.folder))}"


def _step(run: Run) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Run one optimizer step on this rank's micro-batches: every W-th, beginning with that of its own number.

    The data and the random numbers of a micro-batch follow from the seed, the step and its number alone. So it is the
    same on whichever rank it is, and a step with dropout has the same bits on any number of ranks, and when resumed.

    Returns:
        What each of them brings to the mean loss, and the gradient norm, all still on the device.
    """
    job = run.job
    losses = []
    data = {"seed": job.seed, "step": run.step, "batch": job.batch, "sequence": run.sequence}
    counted = counted_tokens(run.tokens, **data, micro_batches=run.micro_batches)
    for micro_batch in range(run.ranks.rank, run.micro_batches, run.ranks.size):
        batch = training_batch(run.tokens, **data, micro_batch=micro_batch, micro_batches=run.micro_batches)
        torch.manual_seed(seed_of(job.seed, run.step, micro_batch))
        with nullcontext() if micro_batch + run.ranks.size >= run.micro_batches else run.model.no_sync():
            loss = run.loss(batch) / (counted / counted_in(batch))  # the step's mean, over what the loss counts
            run.optimizer.backward(loss)
        losses.append(loss.detach())
    norm = run.optimizer.clip_grad_norm_(job.clip) if job.clip else None
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    run.step += 1
    return losses, norm


def _remedy(run: Run, step: int) -> str:
    if step == 1:
        return (
            ", before any update: the weights of --model are no usable numbers, or too large for --dtype, which is "
            f"{run.job.dtype}; try --dtype float32, or another --model"
        )
    return "; lower --learning-rate, or lengthen --warmup"


def _reporter(run: Run, times: StepTimes, line: ProgressLine) -> Report:
    """A function that turns a finished step into a row of metrics.jsonl and a progress line."""
    factor = schedule(run.job)
    peak_learning_rate = run.job.peak_learning_rate(run.loaded.learning_rate)

    def report(result: StepResult, loss: float, alone_ms: float | None) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {result.step}{_remedy(run, result.step)}")
        step_ms = times.add(result.ended_s)
        if not run.writes:
            return
        took_ms = step_ms if alone_ms is None else alone_ms
        tokens_per_s = None if took_ms is None else run.tokens_per_step / took_ms * 1000
        tflops = None if tokens_per_s is None else tokens_per_s * run.flops_per_token / 1e12
        memory: dict[str, Any] = {"device_bytes": run.device_peak_bytes, "host_bytes": resident_bytes()}
        run.metrics.add(
            {
                "step": result.step,
                "loss": loss,
                "gradient_norm": result.gradient_norm,
                "learning_rate": peak_learning_rate * factor(result.step - 1),
                "step_ms": step_ms,
                "alone_ms": alone_ms,
                "tokens_per_s": tokens_per_s,
                "model_tflops": tflops,
                **memory,
            }
        )
        plain = result.step in (1, run.job.steps) or result.step % run.job.log_every == 0
        line.update(result.step, run.metrics.status(), plain=plain)

    return report
