"""One training that several ranks do and that a plain loop on one process repeats, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from protrain.forward.chunked_loss import chunk_loss
from tests.engine.harness import Spec, Trainer, adamw, default_loss, seeded, states, wrap_under
from tests.engine.plain_loop import PlainOptimizer, prepare_plain

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Training:
    """What is trained, and how. It travels to other processes, so ``make`` and ``batches`` must be importable."""

    make: Callable[[], nn.Module]
    batches: Callable[[int], list[Any]]  # so many micro-batches
    dtype: str = "float32"
    reduction: str = "mean"
    steps: int = 6
    accumulate: int = 1  # micro-batches of each rank in a step
    no_sync: bool = False  # for all of these but the last
    inside: bool = False  # updates are made inside backward
    max_norm: float | None = 0.5
    chunked: bool = False  # the loss is computed in pieces
    device: str = "cpu"  # or "cuda", of which every rank has one

    def device_of(self, rank: int) -> torch.device:
        """Where ``rank`` trains."""
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device(self.device)


@dataclass(frozen=True)
class Outcome:
    """What came of a training: the losses and norms of every step, and all final states."""

    losses: list[list[float]]  # by step and micro-batch
    norms: list[float]
    states: dict[str, Tensor]


def plain(training: Training, size: int) -> Outcome:
    """The training on one process, with the micro-batches of ``size`` ranks: gradients are added, and rounded once."""
    dtype = DTYPES[training.dtype]
    model = training.make()
    if training.chunked:
        chunk_loss(model)
    model, optimizer = prepare_plain(model, adamw(model), device=training.device_of(0), dtype=dtype)
    factor = 1.0 / size if training.reduction == "mean" else 1.0
    count = size * training.accumulate
    batches = training.batches(count * training.steps)
    losses: list[list[float]] = []
    norms: list[float] = []
    for step in range(training.steps):
        found = []
        for batch in batches[step * count : (step + 1) * count]:
            loss = default_loss(model, batch)
            optimizer.backward(loss)
            found.append(loss.item())
        losses.append(found)
        optimizer.sums = {name: total.float() * factor for name, total in optimizer.sums.items()}
        _end_step(training, optimizer, norms)
    return Outcome(losses, norms, states(model, optimizer))


def on_rank(rank: int, size: int, training: Training, specs: Sequence[Spec]) -> list[Outcome]:
    """The training on one of ``size`` ranks, under each plan of ``specs``."""
    if training.device == "cuda":
        torch.cuda.set_device(rank)
    outcomes = []
    for spec in specs:
        with seeded():
            model = training.make()
        batches = training.batches(size * training.accumulate * training.steps)
        wrapped, optimizer = wrap_under(
            spec,
            model,
            adamw(model),
            batches[0],
            device=training.device_of(rank),
            dtype=DTYPES[training.dtype],
            world_size=size,
            gradient_reduction=training.reduction,
            accumulation=training.accumulate,
            step_during_backward=training.inside,
            chunked_loss=training.chunked,
        )
        losses: list[list[float]] = []
        norms: list[float] = []
        own = batches[rank::size]
        for first in range(0, len(own), training.accumulate):
            found = []
            for at, batch in enumerate(own[first : first + training.accumulate]):
                no_sync: Any = wrapped.no_sync
                with no_sync() if training.no_sync and at + 1 < training.accumulate else nullcontext():
                    loss = default_loss(wrapped, batch)
                    optimizer.backward(loss)
                found.append(loss.item())
            losses.append(found)
            _end_step(training, optimizer, norms)
        outcomes.append(Outcome(losses, norms, states(wrapped, optimizer)))
    return outcomes


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


def _end_step(training: Training, optimizer: Trainer | PlainOptimizer, norms: list[float]) -> None:
    if training.max_norm is not None:
        norms.append(float(optimizer.clip_grad_norm_(training.max_norm)))
    optimizer.step()
    optimizer.zero_grad()
