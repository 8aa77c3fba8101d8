"""One training of the comparison, in a process of its own for each GPU.

python -m bench.exactness.worker TASK.json TOKENS.pt TRAINING.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms need it before torch starts

import torch
import torch.distributed as dist

import protrain
from bench.train.models import build_model
from bench.train.options import device_name
from bench.train.ranks import start_group
from bench.train.task import WEIGHT_DECAY, Task
from protrain.common.records import Record
from protrain.distributed.devices import own_device
from protrain.optim.optimizer import ProTrainOptimizer


@dataclass(frozen=True, kw_only=True)
class Training(Record):
    """One of the trainings, with what it came to."""

    gpus: int
    device_memory: str | None  # of each of them; None: all that is free
    plan: str = ""
    losses: tuple[float, ...] = ()  # of all micro-batches, step by step
    norms: tuple[float, ...] = ()
    checksum: str = ""  # of every bit of every master and moment
    step_ms: float = 0.0
    device: str = ""
    device_bytes: int = 0  # the peak of the first GPU
    host_bytes: int = 0  # what the engine of its rank takes


def main() -> None:
    """Train as the command line says. Rank 0 writes what it came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("task", "tokens", "training"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    task, training = Task.load(args.task), Training.load(args.training)
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    start_group("nccl" if device.type == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True)
    done = train(task, training, torch.load(args.tokens), device)
    if dist.get_rank() == 0:
        done.save(args.training)
    dist.destroy_process_group()


def train(task: Task, training: Training, tokens: torch.Tensor, device: torch.device) -> Training:
    """Train as one of the ranks on ``tokens`` [steps, micro-batches, batch, sequence]."""
    model = build_model(task)
    accumulation = task.gpus // training.gpus
    model, optimizer = protrain.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=WEIGHT_DECAY),
        example_batch={"input_ids": tokens[0, 0], "labels": tokens[0, 0]},
        device=device,
        device_memory=training.device_memory,
        host_memory=task.host_memory,
        accumulation=accumulation,
    )
    losses: list[float] = []
    norms, durations_ms = [], []
    for step in tokens[:, dist.get_rank() :: training.gpus]:
        start = time.perf_counter()
        own = []
        for number, ids in enumerate(step, start=1):
            with contextlib.nullcontext() if number == accumulation else model.no_sync():
                loss = model(input_ids=ids, labels=ids).loss
                optimizer.backward(loss / accumulation)
            own.append(loss.detach())
        norms.append(float(optimizer.clip_grad_norm_(task.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
        durations_ms.append((time.perf_counter() - start) * 1e3)
        of_ranks: list[list[float]] = [[] for _ in range(training.gpus)]
        dist.all_gather_object(of_ranks, [float(loss) for loss in own])
        losses += [loss for micro_batches in zip(*of_ranks, strict=True) for loss in micro_batches]
    report = optimizer.report()
    return replace(
        training,
        plan=str(optimizer.plan),
        losses=tuple(losses),
        norms=tuple(norms),
        checksum=checksum(optimizer),
        step_ms=statistics.median(durations_ms[task.warm_up :]),
        device=device_name(device),
        device_bytes=report.device_bytes,
        host_bytes=report.host_bytes,
    )


def checksum(optimizer: ProTrainOptimizer) -> str:
    """A checksum of every bit of all states, the same on any number of ranks, which all call it."""
    digest = hashlib.sha256()
    for name in optimizer.parameter_names():
        state = optimizer.export_parameter(name)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            digest.update(state[kind].contiguous().numpy().data)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
