"""Finishes a run after its last step: evaluates, and writes a sample, the model, the loss curve and the summary."""

from __future__ import annotations

import shlex
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from protrain.checkpoint.export import export
from protrain.cli.data import COUNTED, Part
from protrain.cli.metrics import draw_loss_curve, peak_resident_bytes, quantile
from protrain.cli.run_files import MODEL_FOLDER, SAMPLE_FILE, SUMMARY_FILE
from protrain.cli.summary import TrainSummary, device_name, versions
from protrain.cli.training_run import Run
from protrain.common.progress import stage
from protrain.distributed.agreement import raised_on_all

_PROMPT_TOKENS = 32


def finish(run: Run, look: Callable[[], None]) -> TrainSummary:
    """Evaluate, and write everything that a finished run leaves in its folder. ``look`` is called between the stages.

    The first rank writes. If it cannot, the error is raised on all ranks.
    """
    job, folder = run.job, run.folder
    with stage("evaluating"):
        evaluation_loss = run.evaluate()
    look()
    if job.save_model:
        with stage("writing the model"):
            if run.writes:
                shutil.rmtree(folder / MODEL_FOLDER, ignore_errors=True)  # of a finish that was interrupted
            export(run.model, folder / MODEL_FOLDER, tokenizer=run.loaded.codec.tokenizer, merge=job.merge)
        look()
    text = None
    if job.sample_tokens:
        with stage("writing a sample"):
            text = sample(run)
        look()
    summary = summarise(run, evaluation_loss)
    with raised_on_all(run.ranks):
        if run.writes:
            if text is not None:
                (folder / SAMPLE_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")
            draw_loss_curve(folder, run.metrics.rows, run.tokens.unigram_entropy)
            summary.save(folder / SUMMARY_FILE)
    return summary


def discard_unfinished(folder: Path) -> None:
    """Remove what an interrupted ``finish`` was writing."""
    shutil.rmtree(folder / f".{MODEL_FOLDER}.tmp", ignore_errors=True)
    for path in folder.glob(f".{SUMMARY_FILE}.*.tmp"):
        path.unlink()


def sample(run: Run) -> str:
    """A held-out prompt and the model's continuation. It is the same for the same weights and seed."""
    source = run.tokens.held_out if len(run.tokens.held_out) else run.tokens.train
    positions = run.loaded.positions or run.sequence + run.job.sample_tokens
    room = positions - min(run.job.sample_tokens, positions // 2)  # as a prompt may take all positions
    length = min(prompt_tokens(source), len(source), run.sequence, room)
    prompt = torch.from_numpy(source.tokens[:length].astype("int64"))[None].to(run.device)
    run.model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(run.job.seed)
        generated = run.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(run.job.sample_tokens, positions - length),
            do_sample=True,
            temperature=0.8,
            top_k=50,
        )
    run.model.train()
    return run.loaded.codec.decode(generated[0].tolist())


def prompt_tokens(part: Part) -> int:
    """The length of a prompt at the begin of ``part``: what the first row asks, if its answer alone is counted."""
    asked = 0 if part.marks is None else int(np.argmax(part.marks[: len(part)] & COUNTED))
    return asked if asked > 1 else _PROMPT_TOKENS


def summarise(run: Run, evaluation_loss: float | None) -> TrainSummary:
    """Collect the figures of a run whose steps are all done."""
    job, losses = run.job, run.metrics.losses()
    last_losses = [loss for step, loss in losses.items() if step > job.steps - max(job.steps // 10, 1)]
    device_peak_bytes = run.device_peak_bytes
    own = bool(run.metrics.times_ms("step_ms", own=True))
    if not own:  # this process resumed after the last step, so the steps ran in earlier processes
        device_peak_bytes = max([device_peak_bytes, *(row.get("device_bytes", 0) for row in run.metrics.rows)])
    among_others_ms = run.metrics.times_ms("step_ms", own=own)
    times_ms = among_others_ms or run.metrics.times_ms("alone_ms", own=own)
    step_ms = quantile(times_ms, 0.5)
    tokens_per_s = None if step_ms is None else run.tokens_per_step / step_ms * 1000
    report = run.optimizer.report()
    cuda = run.device.type == "cuda"
    return TrainSummary(
        command=shlex.join(["protrain", *sys.argv[1:]]),
        device=device_name(run.device),
        versions=versions(),
        model=job.model,
        parameters=run.parameters,
        trained_parameters=run.trained_parameters,
        dtype=str(job.dtype),
        batch=job.batch,
        sequence=run.sequence,
        accumulation=run.micro_batches // run.ranks.size,
        gpus=run.ranks.size,
        tokens_per_step=run.tokens_per_step,
        steps=job.steps,
        initial_loss=losses.get(1),
        final_loss=statistics.fmean(last_losses) if last_losses else None,
        evaluation_loss=evaluation_loss,
        unigram_entropy=run.tokens.unigram_entropy,
        step_ms=step_ms,
        step_ms_p20=quantile(times_ms, 0.2),
        step_ms_p80=quantile(times_ms, 0.8),
        steps_alone=bool(times_ms) and not among_others_ms,
        tokens_per_s=tokens_per_s,
        parameter_tflops=None if tokens_per_s is None else run.parameter_flops_per_token * tokens_per_s / 1e12,
        model_tflops=None if tokens_per_s is None else run.flops_per_token * tokens_per_s / 1e12,
        device_peak_bytes=device_peak_bytes,
        device_reserved_bytes=max(torch.cuda.max_memory_reserved(run.device) if cuda else 0, device_peak_bytes),
        predicted_device_bytes=report.predicted_device_bytes,
        host_bytes=report.host_bytes,
        predicted_host_bytes=report.predicted_host_bytes,
        process_peak_bytes=peak_resident_bytes(),
        plan=run.optimizer.plan,
    )
