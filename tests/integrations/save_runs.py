"""Trainings that are saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import TrainerCallback

from protrain.optim.optimizer import ProTrainOptimizer
from tests.integrations.clients import Run, make, train


def gathered(*_: Any, **__: Any) -> Any:
    raise AssertionError("the whole state of the optimizer is gathered")


def through_and_resumed(client: str, folder: Path) -> tuple[Run, Run]:
    """A training, and one that goes on from its first checkpoint. Neither may hold the whole state of the optimizer."""
    with patch.multiple(ProTrainOptimizer, full_state_dict=gathered, state_dict=gathered, load_state_dict=gathered):
        through = train(client, folder / "through", on_protrain=True)
        half = folder / "through" / "checkpoint-2"
        return through, train(client, folder / "resumed", on_protrain=True, resume=half)


def through_and_resumed_on_rank(rank: int, client: str, folder: Path) -> tuple[Run, Run]:
    return through_and_resumed(client, folder)


class _AtSaves(TrainerCallback):
    """Keeps the weights at each save."""

    def __init__(self) -> None:
        self.weights: dict[str, dict[str, Tensor]] = {}

    def on_save(self, _: Any, state: Any, __: Any, *, model: Any, **___: Any) -> None:
        taken = {name: value.clone() for name, value in model.state_dict().items()}
        self.weights[f"checkpoint-{state.global_step}"] = taken


def best(
    client: str, folder: Path, arguments: dict[str, Any]
) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """A training that ends with its best model.

    Returns the checkpoints that are left, the weights when the best was saved, and those at the end.
    """
    trainer = make(client, folder, on_protrain=True, load_best_model_at_end=True, **arguments)
    at_saves = _AtSaves()
    trainer.add_callback(at_saves)
    trainer.train()
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    return left, at_saves.weights[Path(trainer.state.best_model_checkpoint).name], dict(trainer.model.state_dict())


def best_on_rank(
    rank: int, client: str, folder: Path, arguments: dict[str, Any]
) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    return best(client, folder, arguments)
