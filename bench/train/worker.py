"""One contestant in a process of its own: a CUDA context, an allocator and host memory that nothing has used before.

python -m bench.train.worker JOB.json OUT.json

It is one of several ranks where the environment says so, as torchrun's does. Each rank has a GPU and a batch of its own
and writes what it knows to a file of its own.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench.train.clients.timed import run_client
from bench.train.contestants import KINDS
from bench.train.fsdp2 import fsdp2_trainer
from bench.train.llmq import llmq_trainer
from bench.train.options import device_name
from bench.train.peaks import finish, forbid_more, peaks, pinned_by_torch
from bench.train.peers import deepspeed_trainer, torchao_trainer
from bench.train.ranks import any_rank, file_of
from bench.train.results import UNFINISHED, Outcome
from bench.train.task import Job
from bench.train.trainers import Trainer, floor_trainer, protrain_trainer, resident_trainer
from protrain.distributed.devices import own_device
from protrain.distributed.joining import local_rank
from protrain.forward.compilation import graphs_compiled
from protrain.hardware.detection import use_expandable_segments

_KEEP_EVERY_S = 5.0

BUILDERS: dict[str, Callable[[Job, torch.device, Tensor], Trainer]] = {
    "protrain": protrain_trainer,
    "floor": floor_trainer,
    "resident": resident_trainer,
    "fsdp2": fsdp2_trainer,
    "zero2": deepspeed_trainer,
    "zero3": deepspeed_trainer,
    "zero3params": deepspeed_trainer,
    "torchao": torchao_trainer,
    "llmq": llmq_trainer,
}


def main() -> int:
    """Do the job that the command line names, and return the exit status. What stops it is its outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    job = Job.load(args.job)
    out = file_of(args.out, local_rank())
    device = own_device()
    # The stacks in its log say where a worker stood that did not end in time.
    faulthandler.dump_traceback_later(max(1.0, job.until - time.time()))
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            forbid_more(job.task.device_memory, device)
            use_expandable_segments()  # ProTrain sets it; the others gain by it too
        torch.manual_seed(0)
        outcome = (run_client if KINDS[job.contestant.kind].is_client else run)(job, device, out)
    except Exception as error:  # whatever a system says when it cannot do the task is a result
        message = next((line for line in str(error).splitlines() if line.strip()), "")
        text = f"{type(error).__name__}: {message}"[:500]
        begun = Outcome.load(out) if out.exists() else Outcome(contestant=job.contestant)
        replace(begun, error=text, **peaks(device)).save(out)
        return 1
    outcome.save(out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def run(job: Job, device: torch.device, out: Path) -> Outcome:
    """Build the contestant, warm up, and time its steps. What is known by then goes to ``out`` on the way."""
    rank = local_rank()
    own = slice(None) if KINDS[job.contestant.kind].one_process else slice(rank, rank + 1)  # of the GPUs
    batches = torch.load(job.tokens)[:, own].unflatten(2, (job.task.accumulation, -1))
    batches = batches.transpose(1, 2).flatten(1, 3).to(device)  # the rows of one micro-batch after another
    start = time.perf_counter()
    trainer = BUILDERS[job.contestant.kind](job, device, batches[0, : job.task.batch])
    finish(device)
    setup_s = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begun = Outcome(
        contestant=job.contestant,
        error=UNFINISHED,
        parameters=trainer.parameters,
        device=device_name(device),
        setup_s=setup_s,
        plan=trainer.plan,
    )
    begun.save(out)
    step_ms, losses, norms, first_ended = train(
        job, trainer, batches, device, lambda taken, losses: replace(begun, step_ms=taken, losses=losses).save(out)
    )
    return replace(
        begun,
        error="",
        first_step_s=first_ended - start,
        step_ms=tuple(step_ms),
        first_loss=losses[job.task.warm_up],
        last_loss=losses[-1],
        losses=tuple(losses),
        gradient_norms=tuple(norms),
        clipped_steps=sum(norm > job.task.clip_norm for norm in norms[job.task.warm_up :]),
        **peaks(device, beside_torch=trainer.device_bytes()),
        host_pinned_bytes=trainer.pinned_bytes() + pinned_by_torch(device),
        config={
            **trainer.config,
            **trainer.said_afterwards(),
            # One for all blocks; more would mean that the compiler gave some of them up.
            "compiled_graphs": graphs_compiled(),
            "host_threads": torch.get_num_threads(),
            "allocator": "expandable_segments:True",
        },
    )


def train(
    job: Job,
    trainer: Trainer,
    batches: Tensor,
    device: torch.device,
    keep: Callable[[tuple[float, ...], tuple[float, ...]], None],
) -> tuple[list[float], list[float], list[float], float]:
    """Milliseconds of every timed step, loss and gradient norm of every step, and when the first step ended.

    There are no norms without clipping, and the time is one of ``time.perf_counter``.

    A step ends when the compute stream is done with it. What a system still does then beside it (ProTrain's deferred
    updates) the next step waits for, so in the steady state nothing is left out. ``keep`` is given times and losses now
    and then, seldom enough for what it takes to show in no time. Raises RuntimeError for a loss that is not finite, and
    when the time was up before three steps were timed.
    """
    step_ms, losses, norms = [], [], []
    finish(device)
    before = kept = first_ended = time.perf_counter()
    for index, ids in enumerate(batches):
        if any_rank(time.time() > job.until):  # ranks wait for each other in a step, so all do it or none
            break
        loss, norm = trainer.step(ids)
        finish(device)
        now = time.perf_counter()
        if index == 0:
            first_ended = now
        if index >= job.task.warm_up:
            step_ms.append((now - before) * 1e3)
        losses.append(loss.item())
        if norm is not None:
            norms.append(norm.item())
        if now - kept > _KEEP_EVERY_S:
            keep(tuple(step_ms), tuple(losses))
            kept = now
        before = now  # reading and keeping are in the next step, as what a system still does beside them is
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"the loss is not finite: {losses}")
    if len(step_ms) < min(3, job.task.steps):
        raise RuntimeError(f"only {len(step_ms)} steps were timed before the time was up")
    return step_ms, losses, norms, first_ended


if __name__ == "__main__":
    status = main()
    if status == 0:
        atexit._run_exitfuncs()  # tells the other ranks that this one has ended and did not die
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the end of Python could wait for threads of libraries, and for ranks that have failed
