"""One contestant in a process of its own: a CUDA context, an allocator and host memory that nothing has used before.

python -m bench.train.worker JOB.json OUT.json

It is one of several ranks where the environment says so, as torchrun's does. Each rank has a GPU and a batch of its own
and writes what it knows to a file of its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.train.fsdp2 import fsdp2_trainer
from bench.train.llmq import llmq_trainer
from bench.train.peers import deepspeed_trainer, torchao_trainer
from bench.train.ranks import any_rank, file_of
from bench.train.results import UNFINISHED, Outcome
from bench.train.task import Job
from bench.train.trainers import Trainer, floor_trainer, protrain_trainer, resident_trainer
from protrain.cli.summary import device_name
from protrain.common.tables import parse_memory
from protrain.distributed.devices import own_device
from protrain.distributed.joining import local_rank
from protrain.forward.compilation import graphs_compiled
from protrain.hardware.allocator import use_expandable_segments

_KEEP_EVERY_S = 5.0

_Job = TypeVar("_Job", bound=Job)

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
    """Run the contestant and return its exit status. What stops it is its outcome."""
    return work(Job, run)


def work(kind: type[_Job], measure: Callable[[_Job, torch.device, Path], Outcome]) -> int:
    """Do the job that the command line names, of a ``kind``, by ``measure``, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    job = kind.load(args.job)
    out = file_of(args.out, local_rank())
    device = own_device()
    # The stacks in its log say where a worker stood that did not end in time.
    faulthandler.dump_traceback_later(max(1.0, job.until - time.time()))
    try:
        outcome = measure(job, device, out)
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
    if device.type == "cuda":
        torch.cuda.set_device(device)
        forbid_more(job.task.device_memory, device)
        use_expandable_segments()  # ProTrain sets it; the others gain by it too
    torch.manual_seed(0)
    batches = torch.load(job.tokens)[:, local_rank()].to(device)
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
        host_pinned_bytes=trainer.pinned_bytes() + _pinned_by_torch(device),
        config={
            **trainer.config,
            **trainer.said_afterwards(),
            # One for all blocks; more would mean that the compiler gave some of them up.
            "compiled_graphs": graphs_compiled(),
            "host_threads": torch.get_num_threads(),
            "allocator": "expandable_segments:True",
        },
    )


def forbid_more(device_memory: str | None, device: torch.device) -> None:
    """Let the allocator have ``device_memory`` ("24GiB") of a GPU, cached blocks included; None or a CPU: all of it."""
    if device_memory is not None and device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        limit_bytes = parse_memory(device_memory, name="device_memory")
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), torch.cuda.current_device())


def peaks(device: torch.device, beside_torch: int = 0) -> dict[str, Any]:
    """The most memory of this process: of the device since its statistics were reset, of the host since it began.

    ``beside_torch`` are bytes of the device that the contestant has from an allocator of its own.
    """
    on_gpu = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if on_gpu else (0, 0)
    return {
        "device_allocated_bytes": torch.cuda.max_memory_allocated(device) + beside_torch if on_gpu else 0,
        "device_reserved_bytes": torch.cuda.max_memory_reserved(device) + beside_torch if on_gpu else 0,
        "device_other_bytes": total - free - torch.cuda.memory_reserved(device) - beside_torch if on_gpu else 0,
        "host_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


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


def finish(device: torch.device) -> None:
    """Wait for the compute stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _pinned_by_torch(device: torch.device) -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)) if device.type == "cuda" else 0


if __name__ == "__main__":
    status = main()
    if status:
        os._exit(status)  # the end of Python would wait for operations that other ranks take part in no more
