"""Times the steps of a client, whose loop is its own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench.clock import device_timer, durations_ms
from bench.train.clients.loops import LOOPS
from bench.train.clients.run import Run
from bench.train.clients.trainers import TRAINERS
from bench.train.models import build_model
from bench.train.options import device_name
from bench.train.peaks import finish, peaks
from bench.train.results import Outcome
from bench.train.task import Job, Task
from bench.train.trainers import count
from protrain.distributed.joining import local_rank
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Plan


class Steps:
    """The ends of the optimizer's steps, whoever calls it, as torch tells them.

    The device is waited for at the ends of the timed steps alone. Between them each step ends with an event on it.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._device = device
        self._ends: list[Any] = []  # moments of device_timer
        self.done = 0
        self.plan: Plan | None = None
        self.peaks: dict[str, Any] = {}
        register_optimizer_step_post_hook(self._ended)

    def _ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        task, self.done = self._task, self.done + 1
        if self.done == task.warm_up:
            finish(self._device)
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
        if task.warm_up <= self.done <= task.warm_up + task.steps:
            self._ends.append(device_timer())
        if self.done == task.warm_up + task.steps:
            finish(self._device)
            self.peaks = peaks(self._device)
            if isinstance(optimizer, ProTrainOptimizer):
                self.plan = optimizer.plan

    @property
    def step_ms(self) -> tuple[float, ...]:
        """The milliseconds from the end of each step to the end of the next."""
        return durations_ms(self._ends)


def run_client(job: Job, device: torch.device, out: Path) -> Outcome:
    """Let the client train.

    Raises:
        RuntimeError: the client made another number of steps than it was told, or a loss is not finite.
    """
    steps = Steps(job.task, device)
    training = Run(
        task=job.task,
        on_protrain=not job.contestant.plain,
        device=device,
        rank=local_rank(),
        rows=torch.load(job.tokens).transpose(1, 2).flatten(0, 2).contiguous(),
        folder=out.parent / job.contestant.name,
    )
    training.folder.mkdir(exist_ok=True)
    (LOOPS | TRAINERS)[job.contestant.kind](training)
    losses = tuple(float(loss) for loss in training.losses)
    if not len(losses) == steps.done == training.total_steps:
        raise RuntimeError(f"{steps.done} steps and {len(losses)} losses, where {training.total_steps} were to be")
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"the loss is not finite: {losses}")
    return replace(
        Outcome(contestant=job.contestant),
        step_ms=steps.step_ms,
        parameters=count(build_model(job.task)),
        first_loss=losses[job.task.warm_up],
        last_loss=losses[-1],
        losses=losses,
        device=device_name(device),
        plan=steps.plan,
        config={} if steps.plan is None else {"plan": str(steps.plan)},
        **steps.peaks,
    )
