"""A training that several ranks do, save and resume, and that the plain loop repeats micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import protrain
from protrain.common.parameters import DTYPES
from protrain.forward.chunked_loss import chunk_loss
from tests.engine import residual
from tests.engine.harness import Loop, Spec, adamw, default_loss, seeded, states, wrap_under
from tests.engine.plain_loop import prepare_plain

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


class Training:
    """The model, optimizer and scheduler of one rank of ``size``.

    Args:
        spec: the plan. None: the first call of the model makes it. "plain": the plain loop, on one process.
        make: the model, importable as ``batches`` is, because both travel to other processes.
        batches: so many micro-batches.
        micro_batches: of a step, on all ranks together.
        no_sync: for all micro-batches of a step but the last.
        inside: whether updates are made inside backward.
        factor: what the plain loop multiplies losses with.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        spec: Spec | str | None,
        *,
        make: Callable[[], nn.Module] = make,
        batches: Callable[[int], list[Any]] = residual.batches,
        micro_batches: int = 4,
        dtype: str = "float32",
        moments: str = "float32",
        reduction: str = "sum",
        no_sync: bool = False,
        inside: bool = False,
        max_norm: float | None = 0.5,
        chunked: bool = False,
        device: str = "cpu",
        factor: float = 1.0,
    ) -> None:
        self.model: nn.Module
        self.optimizer: Any
        self.rank, self.size, self.batches, self.count = rank, size, batches, micro_batches // size * size
        accumulation = micro_batches // size
        self.loop = Loop(
            max_norm, accumulation, no_sync, scheduler=False, loss=lambda *given: default_loss(*given) * factor
        )
        with seeded():
            model = make()
        how: dict[str, Any] = {"device": torch.device(f"cuda:{rank}" if device == "cuda" else device)}
        how["dtype"] = DTYPES[dtype]
        if isinstance(spec, str):
            if chunked:
                chunk_loss(model)
            self.model, self.optimizer = prepare_plain(model, adamw(model), **how)
        else:
            how |= {"moment_dtype": moments, "gradient_reduction": reduction, "accumulation": accumulation}
            how |= {"step_during_backward": inside, "chunked_loss": chunked}
            if spec is None:
                how |= {"device_memory": "64MiB", "host_memory": "1GiB", "progress": False}
                self.model, self.optimizer = protrain.wrap(model, adamw(model), **how)
            else:
                self.model, self.optimizer = wrap_under(
                    spec, model, adamw(model), batches(1)[0], world_size=size, **how
                )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)

    def train(self, steps: range) -> list[list[float]]:
        """Train ``steps``. Micro-batch i of a step is that of rank i mod ``size``. Returns losses and norm of each."""
        found = []
        for step in steps:
            batches = self.batches((step + 1) * self.count)[step * self.count :]
            found.append(self.loop.run(self.model, self.optimizer, batches[self.rank :: self.size]))
            self.scheduler.step()
        return found

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


def train_under(
    rank: int, size: int, specs: Sequence[Spec | str], steps: int, how: dict[str, Any]
) -> list[tuple[list[list[float]], dict[str, Tensor]]]:
    """Losses and norms of all ``steps``, and the states, of a training with each plan."""
    if how.get("device") == "cuda":
        torch.cuda.set_device(rank)
    trainings = (Training(rank, size, spec, **how) for spec in specs)
    return [(training.train(range(steps)), training.states()) for training in trainings]


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


def go_on(rank: int, size: int, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """``run`` on one of ``size`` ranks. Returns the states at the time of the save, and in the end."""
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
    return saved, training.states()


def step(model: nn.Module, optimizer: Any, batch: Any) -> float:
    """One clipped step. Returns the loss."""
    loss = default_loss(model, batch)
    optimizer.backward(loss)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def set_dropout(model: nn.Module, share: float) -> nn.Module:
    """``model``, all of whose dropout layers drop this share."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
    return model
