"""A training that is saved on some number of ranks and goes on with another, as each of its ranks runs it."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import protrain
from tests.distributed.training import DTYPES, set_dropout
from tests.engine import residual
from tests.engine.harness import Spec, adamw, default_loss, states, wrap_under

MICRO_BATCHES = 4  # of a step, on all ranks together; three ranks have three
FIRST = Spec("some", "middle", "cn", small=True)
SECOND = Spec("none", "least", "sc", speculate=True)
THIRD = Spec("all", "least", "n")
FOURTH = Spec("none", "middle", "c", small=True, stream=True)


def make() -> nn.Module:
    """A model without dropout. Its sizes are such that shards begin and end in the middle of rows."""
    model = set_dropout(residual.make(width=37, depth=3), 0.0)
    model.get_parameter("enter.bias").requires_grad_(False)
    model.register_buffer("mark", torch.zeros(3))
    return model


@dataclass(frozen=True)
class Run:
    """One process group's turn: load, train, save and train on, each if it is asked for."""

    spec: Spec | None  # None: the first call of the model makes the plan, after the load
    dtype: str = "float32"
    moments: str = "float32"
    load: str | None = None  # a folder
    save: str | None = None
    before: range = range(0)  # the steps that are trained after the load
    after: range = range(0)  # those after the save


@dataclass(frozen=True)
class Outcome:
    """The states at the time of the save, and in the end."""

    saved: dict[str, Tensor]
    final: dict[str, Tensor]


class Training:
    """The model, optimizer and scheduler of one rank of ``size``. Without a ``spec``, the first call makes the plan."""

    def __init__(
        self,
        rank: int,
        size: int,
        spec: Spec | None,
        *,
        dtype: str = "float32",
        moments: str = "float32",
        process_group: dist.ProcessGroup | None = None,
        micro_batches: int = MICRO_BATCHES,
    ) -> None:
        self.rank, self.size = rank, size
        self.accumulate = micro_batches // size
        self.batches = residual.batches(size * self.accumulate)
        model = make()
        how: dict[str, Any] = {
            "device": torch.device("cpu"),
            "dtype": DTYPES[dtype],
            "gradient_reduction": "sum",
            "accumulation": self.accumulate,
            "moment_dtype": moments,
            "process_group": process_group,
        }
        if spec is None:
            how |= {"device_memory": "64MiB", "host_memory": "1GiB", "progress": False}
            self.model, self.optimizer = protrain.wrap(model, adamw(model), **how)
        else:
            self.model, self.optimizer = wrap_under(spec, model, adamw(model), self.batches[0], world_size=size, **how)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)

    def train(self, steps: range) -> None:
        """Train ``steps``. Micro-batch i of a step is that of rank i mod ``size``."""
        for step in steps:
            for batch in self.batches[self.rank :: self.size]:
                self.optimizer.backward(default_loss(self.model, (batch[0].roll(step, 0),)))
            self.optimizer.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def train_one(self) -> None:
        """Train the step after those that were trained."""
        step: int = self.scheduler.last_epoch
        self.train(range(step, step + 1))

    def states(self) -> dict[str, Tensor]:
        """All states, and what the scheduler has made of the learning rate."""
        return {**states(self.model, self.optimizer), "lr": torch.tensor(self.scheduler.get_last_lr())}

    def save(self, folder: str, **how: Any) -> None:
        protrain.save_checkpoint(folder, self.model, self.optimizer, scheduler=self.scheduler, **how)

    def save_beside(self, folder: str, **how: Any) -> Any:
        """``save``, beside the training. ``result()`` of what it returns is the path."""
        return protrain.async_save(folder, self.model, self.optimizer, scheduler=self.scheduler, **how)

    def load(self, folder: str) -> Any:
        return protrain.load_checkpoint(folder, self.model, self.optimizer, scheduler=self.scheduler)


def go_on(rank: int, size: int, run: Run) -> Outcome:
    """``run`` on one of ``size`` ranks."""
    training = Training(rank, size, run.spec, dtype=run.dtype, moments=run.moments)
    if run.load is not None:
        if run.spec is not None:  # whatever that leaves behind, such as gathered weights, must not outlive the load
            training.train(range(7, 8))
        training.load(run.load)
    else:  # a frozen parameter, of which most ranks have nothing, must come from the save as well
        with protrain.full_parameters(training.model), torch.no_grad():
            training.model.get_parameter("enter.bias").fill_(0.5)
    training.train(run.before)
    saved = training.states()
    if run.save is not None:
        training.save(run.save)
    training.train(run.after)
    return Outcome(saved, training.states())


def save_randoms(rank: int, size: int, folder: str) -> list[float]:
    """Save in the middle of random numbers that differ by rank. Returns those that follow."""
    training = Training(rank, size, THIRD)
    training.model.get_buffer("mark").fill_(rank + 5.0)
    torch.manual_seed(rank)
    random.seed(rank)
    training.save(folder, extra={"rank": rank})
    return [torch.rand(()).item(), random.random()]


def load_randoms(rank: int, size: int, folder: str) -> tuple[list[float], float, Any, list[str]]:
    """The next random numbers after a load, the buffer and ``extra`` of the save, and all warnings."""
    training = Training(rank, size, THIRD)
    torch.manual_seed(99)
    random.seed(99)
    with warnings.catch_warnings(record=True, action="always") as warned:
        extra = training.load(folder)
    texts = [str(warning.message) for warning in warned]
    return [torch.rand(()).item(), random.random()], float(training.model.get_buffer("mark")[0]), extra, texts


def fail_to_load(rank: int, size: int, folders: list[str]) -> list[tuple[str, bool]]:
    """The errors of loading ``folders``, and whether the training had all its states afterwards."""
    training = Training(rank, size, SECOND)
    training.train(range(2))
    before = training.states()
    found = []
    for folder in folders:
        try:
            training.load(folder)
        except protrain.CheckpointError as error:
            text = str(error)
        else:
            text = ""
        now = training.states()
        found.append((text, all(torch.equal(now[name], before[name]) for name in before)))
    return found
