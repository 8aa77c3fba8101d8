"""Callbacks of Trainers that read the whole model get the same weights on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from protrain.common.errors import MisuseError
from tests.distributed.pool import on_ranks
from tests.integrations.clients import make

UNSAVED: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no"}


class FirstAlone(TrainerCallback):
    """Does something on the first rank only."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.is_world_process_zero:
            self.act()


def averages_on_rank(rank: int, folder: Path, on_protrain: bool) -> dict[str, Tensor]:
    """The weights that TRL's callback averages after every step, as many scripts do."""
    from trl import BEMACallback

    trainer = make("Trainer", folder, on_protrain=on_protrain, **UNSAVED)
    callback: Any = BEMACallback(update_freq=1, update_after=1)
    trainer.add_callback(callback)
    trainer.train()
    return {name: torch.tensor(value.tolist()) for name, value in callback.running_model.named_parameters()}


def error_of_first_alone(rank: int, what: str, folder: Path) -> str:
    """The error of a training with a callback that reads a weight or saves the model on the first rank only."""
    # The Trainer would wait for the first rank in collectives of its own, which end when that rank's process ends.
    alone: dict[str, Any] = {"average_tokens_across_devices": False, "logging_steps": 100}
    trainer = make("Trainer", folder, on_protrain=True, **alone, **UNSAVED)
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


@pytest.mark.slow
def test_averages_are_the_same_on_all_ranks_and_as_without_protrain(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    ours, other = on_ranks(2, averages_on_rank, tmp_path / "ours", True)
    plain, _ = on_ranks(2, averages_on_rank, tmp_path / "plain", False)
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(other[name], ours[name]), name
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a read of model.embed_tokens.weight", "save_model()"])
def test_what_one_rank_does_alone_is_refused_on_all(what: str, tmp_path: Path) -> None:
    for error in on_ranks(2, error_of_first_alone, what, tmp_path):
        assert f"rank 0 came to {what}" in error
