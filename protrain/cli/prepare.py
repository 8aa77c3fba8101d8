"""Turns a TrainJob into a Run: device, model, data, plan, and the newest checkpoint when resuming."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import protrain
from protrain import validate
from protrain.checkpoint.adapters import Base
from protrain.checkpoint.loading import check_checkpoint, load_checkpoint
from protrain.checkpoint.manifest import list_saves
from protrain.cli.corpus import read_corpus
from protrain.cli.data import check_length, example_batch
from protrain.cli.defaults import choose_compile
from protrain.cli.examples import set_chat_template
from protrain.cli.job import TrainJob
from protrain.cli.loggers import logger
from protrain.cli.metrics import MetricsFile, steps_reached
from protrain.cli.models import LoadedModel, fit_positions, load_model, refuse_huge_batch, refuse_unshifted
from protrain.cli.options import need
from protrain.cli.rows_apart import what_joins_rows
from protrain.cli.run_files import CHECKPOINTS, DATA_FOLDER, JOB_FILE, PLAN_FILE, SUMMARY_FILE, UNFINISHED_DATA
from protrain.cli.trained import adamw, choose_trained, loaded_in_4bit, shape_in_4bit
from protrain.cli.training_run import Run
from protrain.common.adapters import adapter_names
from protrain.common.hub import command_for
from protrain.common.progress import note, stage
from protrain.common.tables import format_bytes
from protrain.distributed.devices import own_device, refuse_shared_gpu
from protrain.distributed.joining import join
from protrain.engine.states.weight_files import weight_sources
from protrain.forward.chunked_loss import can_chunk, chunk_loss
from protrain.hardware.detection import detect
from protrain.planning import Plan
from protrain.validate import choose_dtype

_STATE_BYTES = 12  # of a trained parameter in a checkpoint: its master and two moments in fp32


def prepare(job: TrainJob, folder: Path) -> Run:
    """Do everything up to the first step. ``write_run_files`` then writes the run's files.

    A ValueError says which of model, data, memory, device or checkpoint is wrong, and what to change.
    """
    need("matplotlib", "the loss curve", extra="hf")  # after hours of training it would be too late
    if job.logger is not None:
        need(job.logger, f"--logger {job.logger}")
    device = own_device(job.device)
    dtype = choose_dtype(job.dtype, device)
    ranks = join(None)
    refuse_shared_gpu(ranks, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    goes_on = job.micro_batches is not None
    micro_batches = job.micro_batches or job.accumulation * ranks.size
    if micro_batches % ranks.size:
        possible = ", ".join(str(count) for count in range(1, micro_batches + 1) if micro_batches % count == 0)
        raise ValueError(
            f"a step of the run in {folder} has {micro_batches} batches, of which {ranks.size} GPUs cannot have "
            f"equally many: resume it with one of these numbers of --gpus: {possible}"
        )
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    # These are resolved for good, because what changes the weights must not depend on the device that a run resumes on.
    job = replace(
        job,
        dtype=str(dtype).removeprefix("torch."),
        compile=choose_compile(job.compile, device.type),
        micro_batches=micro_batches,
        checkpoint_every=min(500, job.steps // 10 or 1) if job.checkpoint_every is None else job.checkpoint_every,
    )
    # Reading the text may take hours, so what protrain.wrap would refuse is found before, as far as that takes no time.
    loaded, plain, parameters = _checked_model(job)
    job = replace(job, chunked_loss=can_chunk(loaded.model) if job.chunked_loss is None else job.chunked_loss)
    sequence = job.sequence or loaded.sequence
    fit_positions(loaded, sequence)
    refuse_huge_batch(
        loaded.model,
        batch=job.batch,
        sequence=sequence,
        dtype=dtype,
        device_type=device.type,
        device_bytes=detect(device, device_memory=job.device_memory, host_memory=job.host_memory).device_bytes,
    )
    if job.plan is not None:
        check_plan(job.plan, loaded.model, plain, dtype, batch=job.batch, sequence=sequence)
    base = None
    if job.lora is not None and loaded.folder is not None:
        with stage("reading the model's files, to which checkpoints refer"):
            base = Base.of(loaded.folder, ranks)
    saved = _checked_save(job, folder, loaded.model, base) if goes_on else None
    if job.chat_template is not None:
        set_chat_template(loaded.codec.tokenizer, job.chat_template)
    tokens = read_corpus(job, loaded, folder, ranks, sequence=sequence)
    check_length(tokens, sequence=sequence)
    note(
        f"training {job.model} on {job.data or 'the sources of the library of Python, by default'}"
        f"{'' if loaded.codec.tokenizer else ', read as bytes, as there is no tokenizer'}"
    )
    if ranks.rank == 0 and tokens.train.packed and (reason := what_joins_rows(loaded, sequence=sequence)):
        warnings.warn(
            f"--data: {type(loaded.model).__name__} sees the rows of a sequence as one text, as {reason}; "
            "--no-packing gives each row a sequence of its own",
            stacklevel=2,
        )
    if saved is not None and saved["data_crc32"] != tokens.crc32:
        raise ValueError(f"the data changed since {folder} was saved; restore it, or start another --folder")

    if job.load_in_4bit:
        torch.manual_seed(job.seed)  # for the adapter
        with stage("quantising the model"):
            loaded, plain = _trained(loaded_in_4bit(loaded, device, dtype), job)
    trained = sum(parameter.numel() for parameter in loaded.model.parameters() if parameter.requires_grad)
    torch.manual_seed(job.seed)
    example = example_batch(tokens.train, seed=job.seed, batch=job.batch, sequence=sequence)
    model, optimizer = protrain.wrap(
        loaded.model,
        plain,
        example_batch=loaded.arguments(example),
        device=device,
        dtype=dtype,
        device_memory=job.device_memory,
        host_memory=job.host_memory,
        plan=job.plan,  # the file and not the plan, so that errors name it
        weights=loaded.weights,
        step_during_backward=job.step_during_backward,
        accumulation=micro_batches // ranks.size,
        gradient_reduction="sum",  # as each loss is divided by what the loss of all ranks counts
        moment_dtype=job.moment_dtype,
        compile=bool(job.compile),
        chunked_loss=job.chunked_loss,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(job))
    step = 0
    if saved is not None:
        with stage("loading the checkpoint"):
            step = load_checkpoint(folder / CHECKPOINTS, model, optimizer, scheduler=scheduler, base=base)["step"]
        # The saved rate of the next step is that of a run with the steps which the run had then.
        for group, peak in zip(optimizer.param_groups, scheduler.base_lrs, strict=True):
            group["lr"] = peak * scheduler.lr_lambdas[0](step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    log = logger(job.logger if ranks.rank == 0 else None, folder, resumed_step=step, options=job.to_dict())
    return Run(
        job=job,
        folder=folder,
        loaded=loaded,
        tokens=tokens,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        device=device,
        sequence=sequence,
        parameters=parameters,
        trained_parameters=trained,
        ranks=ranks,
        metrics=MetricsFile(folder, resumed_step=step, log=log),
        base=base,
        step=step,
    )


def _checked_model(job: TrainJob) -> tuple[LoadedModel, torch.optim.AdamW, int]:
    """The model of ``job`` with its adapter, AdamW over what is to be trained, and how many parameters there are."""
    torch.manual_seed(job.seed)  # the random start values depend on it
    loaded = load_model(job.model, from_scratch=job.from_scratch)
    refuse_unshifted(loaded)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    if job.chunked_loss:
        chunk_loss(loaded.model)()
    if loaded.weights is not None:
        weight_sources(loaded.model, loaded.weights)
    if job.load_in_4bit:
        shape_in_4bit(loaded.model)
        loaded = replace(loaded, weights=None)
    loaded, plain = _trained(loaded, job)
    parameters += sum(loaded.model.get_parameter(name).numel() for name in adapter_names(loaded.model))
    return loaded, plain, parameters


def _checked_save(job: TrainJob, folder: Path, model: nn.Module, base: Base | None) -> dict[str, Any] | None:
    """The ``extra`` of the newest save, if there is one. A ValueError says what of the run is missing.

    A run that was killed before its first save starts anew. If it must have been saved, that would lose its steps.
    """
    there = list_saves(folder / CHECKPOINTS)
    reached = steps_reached(folder)
    if not there and ((folder / SUMMARY_FILE).exists() or reached > (job.checkpoint_every or reached)):
        raise ValueError(
            f"{folder / CHECKPOINTS} holds no save, and the run has reached step {reached}: put the saves back, or "
            "start another --folder"
        )
    if job.data is not None and not Path(job.data).exists():
        command = command_for(job.data)
        again = f"; `{command}` brings it to the cache of the Hub again" if command else ""
        raise ValueError(f"--data: {job.data} does not exist{again}; if the text has moved, give its new place")
    return check_checkpoint(folder / CHECKPOINTS, model, base) if there else None


def _trained(loaded: LoadedModel, job: TrainJob) -> tuple[LoadedModel, torch.optim.AdamW]:
    """``loaded`` with the adapter of ``job``, and AdamW over all that is to be trained."""
    loaded = choose_trained(loaded, job.lora, job.freeze)
    return loaded, adamw(loaded.model, job.peak_learning_rate(loaded.learning_rate), job.weight_decay)


def write_run_files(run: Run) -> None:
    """Make the folder that of ``run``, once everything that can be wrong has been checked."""
    if not run.writes:
        return
    run.job.save(run.folder / JOB_FILE)  # written first, because the other files belong to a run only beside it
    shutil.rmtree(run.folder / DATA_FOLDER, ignore_errors=True)  # a resumed run has the same tokens there
    os.rename(run.folder / UNFINISHED_DATA, run.folder / DATA_FOLDER)
    run.optimizer.plan.save(run.folder / PLAN_FILE)
    free, needed = shutil.disk_usage(run.folder).free, _bytes_to_write(run)
    if free < needed:  # or it would be found out after hours of training
        warnings.warn(
            f"the disk of {run.folder} has {format_bytes(free)} free, and checkpoints and model of the run take "
            f"{format_bytes(needed)}: make room while it trains",
            stacklevel=2,
        )


def _bytes_to_write(run: Run) -> int:
    """What the checkpoints that ``run`` is still to write, and its model, take of the disk at once."""
    job, weight_bytes = run.job, getattr(torch, str(run.job.dtype)).itemsize
    written = run.trained_parameters if job.lora is not None and not job.merge else run.parameters
    frozen = 0 if run.base is not None else run.parameters - run.trained_parameters
    there = len(list_saves(run.folder / CHECKPOINTS))
    due = math.ceil((job.steps - run.step) / job.checkpoint_every) if job.checkpoint_every else 0
    saves = max(min(due, job.keep + 1 - there), 0)  # the oldest is deleted once the newest is complete
    return saves * (_STATE_BYTES * run.trained_parameters + weight_bytes * frozen) + job.save_model * (
        weight_bytes * written
    )


def check_plan(
    file: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    *,
    batch: int,
    sequence: int,
) -> None:
    """Raise a ValueError that names ``file`` if it holds no plan, or one for another model or batch.

    It needs no profile.
    """
    plan = Plan.load(file)
    with validate.naming(file):
        if plan.tokens != batch * sequence:
            raise ValueError(
                f"the plan was made for {plan.tokens} tokens in a batch, and this run has {batch * sequence} "
                f"({batch} x {sequence}); give --batch and --sequence of the plan, or make a plan for these"
            )
        validate.check_plan(plan, model, optimizer, dtype)


def schedule(job: TrainJob) -> Callable[[int], float]:
    """A function from a step to its share of the peak learning rate: linear warm-up, then half a cosine."""
    warmup = job.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        share = min((step - warmup) / max(job.steps - 1 - warmup, 1), 1.0)
        return job.min_learning_rate + (1 - job.min_learning_rate) * (1 + math.cos(math.pi * share)) / 2

    return factor
