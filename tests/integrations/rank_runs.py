"""Trainings with dropout whose steps have as many batches on any number of ranks, saved and resumed between."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tests.distributed.pool import on_ranks
from tests.integrations.clients import make

MICRO_BATCHES = 6  # of a step, over all ranks


@dataclass(frozen=True)
class Trained:
    """What a training has logged, its weights after its last step and at its end, and which checkpoints are left."""

    log: list[dict[str, float]]
    last: dict[str, Tensor]
    end: dict[str, Tensor]
    best: str
    left: list[str]
    drawn: float  # from Python's generator after the last step


class _Until(TrainerCallback):
    """Ends a training after a step, and keeps the weights that it has then. Draws a number after each step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.weights: dict[str, Tensor] = {}

    def on_step_end(self, _: Any, state: Any, control: Any, *, model: Any, **__: Any) -> None:
        self.drawn = random.random()
        if state.global_step == self.step:
            self.weights = {name: value.clone() for name, value in model.state_dict().items()}
            control.should_training_stop = True


class _Forgets:
    """A collator that leaves labels out at random."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        batch["labels"][torch.rand(batch["labels"].shape) < 0.5] = -100
        return batch


def _own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """The loss of predicting the next word, over the words of a step."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training is to be, on any number of ranks."""

    client: str
    folder: Path
    until: int = 6  # the step after which it ends
    resume: bool = False
    on_protrain: bool = True
    dropout: float = 0.3
    forgets: bool = False  # whether its collator leaves labels out at random
    own_loss: bool = False  # whether the loss is a function of the user
    arguments: dict[str, Any] = field(default_factory=dict)

    def on(self, ranks: int) -> Trained:
        """What the first of ``ranks`` processes has of it."""
        return self.on_each(ranks)[0]

    def on_each(self, ranks: int) -> list[Trained]:
        """What each of ``ranks`` processes has of it."""
        return [trained(0, self, ranks)] if ranks == 1 else on_ranks(ranks, trained, self, ranks)


def trained(rank: int, training: Training, ranks: int) -> Trained:
    """A training on this rank of ``ranks``, which has a share of the batches of each step."""
    settings = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": MICRO_BATCHES // ranks,
        "max_steps": 6,
        "eval_steps": 1,
        "save_steps": 1,
    }
    given = settings | training.arguments
    trainer = make(training.client, training.folder, on_protrain=training.on_protrain, **given)
    for module in trainer.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = training.dropout
    if training.forgets:
        trainer.data_collator = _Forgets(trainer.data_collator)
    if training.own_loss:
        trainer.compute_loss_func = _own_loss
    until = _Until(training.until)
    trainer.add_callback(until)
    trainer.train(resume_from_checkpoint=training.resume)
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate")
    return Trained(
        log=[{name: row[name] for name in kept if name in row} for row in trainer.state.log_history[:-1]],
        last=until.weights,
        end={name: value.clone() for name, value in trainer.model.state_dict().items()},
        best=Path(trainer.state.best_model_checkpoint or "").name,
        left=sorted(path.name for path in training.folder.glob("checkpoint-*")),
        drawn=until.drawn,
    )
