"""One training that several ranks do and that a plain loop on one process repeats, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from protrain.forward.chunked_loss import chunk_loss
from tests.engine.harness import Loop, Spec, Trainer, adamw, default_loss, seeded, states, wrap_under
from tests.engine.plain_loop import prepare_plain

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
    """What came of a training: of every step the losses of its micro-batches and the norm, and all final states."""

    steps: list[list[float]]
    states: dict[str, Tensor]


def plain(training: Training, size: int) -> Outcome:
    """The training on one process, with the micro-batches of ``size`` ranks: gradients are added, and rounded once."""
    model, count = training.make(), size * training.accumulate
    if training.chunked:
        chunk_loss(model)
    how: dict[str, Any] = {"device": training.device_of(0), "dtype": DTYPES[training.dtype]}
    model, optimizer = prepare_plain(model, adamw(model), **how)
    factor = 1.0 / size if training.reduction == "mean" else 1.0  # a power of two, by which nothing is rounded
    steps = _run(training, model, optimizer, training.batches(count * training.steps), count, factor)
    steps = [[*(loss / factor for loss in step[:count]), *step[count:]] for step in steps]
    return Outcome(steps, states(model, optimizer))


def on_rank(rank: int, size: int, training: Training, specs: Sequence[Spec]) -> list[Outcome]:
    """The training on one of ``size`` ranks, under each plan of ``specs``."""
    if training.device == "cuda":
        torch.cuda.set_device(rank)
    how: dict[str, Any] = {
        "device": training.device_of(rank),
        "dtype": DTYPES[training.dtype],
        "world_size": size,
        "gradient_reduction": training.reduction,
        "accumulation": training.accumulate,
        "step_during_backward": training.inside,
        "chunked_loss": training.chunked,
    }
    batches = training.batches(size * training.accumulate * training.steps)
    outcomes = []
    for spec in specs:
        with seeded():
            model = training.make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches[0], **how)
        steps = _run(training, wrapped, optimizer, batches[rank::size], training.accumulate)
        outcomes.append(Outcome(steps, states(wrapped, optimizer)))
    return outcomes


def _run(
    training: Training, model: nn.Module, optimizer: Trainer, batches: list[Any], accumulate: int, factor: float = 1.0
) -> list[list[float]]:
    """All steps, with losses that are multiplied by ``factor``."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return default_loss(model, batch) * factor

    loop = Loop(training.max_norm, accumulate, training.no_sync, scheduler=False, loss=loss)
    values = loop.run(model, optimizer, batches)
    length = len(values) // training.steps
    return [values[first : first + length] for first in range(0, len(values), length)]


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
