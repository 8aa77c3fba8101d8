"""Trainings with callbacks that read the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from protrain.common.errors import MisuseError
from tests.integrations.clients import make


class Average(TrainerCallback):
    """Averages the weights after every step, as many scripts do."""

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.average = {name: value.detach().clone() for name, value in model.named_parameters()}

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        for name, value in model.named_parameters():
            self.average[name].lerp_(value.detach(), 0.25)


class FirstAlone(TrainerCallback):
    """Does something on the first rank only."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.is_world_process_zero:
            self.act()


def averages(kind: str, folder: Path, *, on_protrain: bool) -> dict[str, Tensor]:
    """The averaged weights after a training with the callback ``kind``: "BEMA" of TRL, or "Average"."""
    arguments: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no"}
    trainer = make("Trainer", folder, on_protrain=on_protrain, **arguments)
    if kind == "BEMA":
        from trl import BEMACallback

        callback: Any = BEMACallback(update_freq=1, update_after=1)
    else:
        callback = Average()
    trainer.add_callback(callback)
    trainer.train()
    found = dict(callback.running_model.named_parameters()) if kind == "BEMA" else callback.average
    return {name: torch.tensor(value.tolist()) for name, value in found.items()}


def averages_on_rank(rank: int, kind: str, folder: Path, on_protrain: bool) -> dict[str, Tensor]:
    return averages(kind, folder, on_protrain=on_protrain)


def error_of_first_alone(rank: int, what: str, folder: Path) -> str:
    """The error of a training with a callback that reads a weight or saves the model on the first rank only."""
    arguments: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no"}
    # The Trainer would wait for the first rank in collectives of its own, which end when that rank's process ends.
    arguments |= {"average_tokens_across_devices": False, "logging_steps": 100}
    trainer = make("Trainer", folder, on_protrain=True, **arguments)
    acts: dict[str, Callable[[], object]] = {
        "a read of model.embed_tokens.weight": lambda: next(iter(trainer.model.parameters())).sum().item(),
        "save_model()": lambda: trainer.save_model(str(folder / "saved")),
    }
    trainer.add_callback(FirstAlone(acts[what]))
    try:
        trainer.train()
    except MisuseError as error:
        return str(error)
    return ""
