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


def close(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("kind", ["BEMA", "Average"])
def test_averages_of_one_process(kind: str, tmp_path: Path) -> None:
    if kind == "BEMA":
        pytest.importorskip("trl")
    close(averages(kind, tmp_path, on_protrain=True), averages(kind, tmp_path, on_protrain=False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BEMA", "Average"])
def test_averages_of_two_processes(kind: str, tmp_path: Path) -> None:
    if kind == "BEMA":
        pytest.importorskip("trl")
    ours, other = on_ranks(2, averages_on_rank, kind, tmp_path / "ours", True)
    assert all(torch.equal(other[name], value) for name, value in ours.items())
    close(ours, on_ranks(2, averages_on_rank, kind, tmp_path / "plain", False)[0])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a read of model.embed_tokens.weight", "save_model()"])
def test_what_one_rank_does_alone_is_refused_on_all(what: str, tmp_path: Path) -> None:
    for error in on_ranks(2, error_of_first_alone, what, tmp_path):
        assert f"rank 0 came to {what}" in error
