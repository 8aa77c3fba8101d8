"""The Trainers on ProTrain have the same bits on any number of ranks, and go on on another number of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.clients import is_before, make, prepare
from tests.integrations.rank_runs import Trained, Training
from tests.integrations.test_trainer_saves import assert_same_weights

# Device memory in which there is a plan for any number of ranks.
MEMORY = {"Trainer": "1.5MiB", "SFT": "1.5MiB", "SFT with LoRA": "1.5MiB", "DPO": "18MiB"}
CLIENTS = ["Trainer", *(pytest.param(each, marks=pytest.mark.slow) for each in MEMORY if each != "Trainer")]
pytestmark = pytest.mark.filterwarnings("ignore:gradient checkpointing of:UserWarning", "ignore::FutureWarning")


def training(client: str, folder: Path, **arguments: Any) -> Training:
    prepare(client, folder)
    return Training(client=client, folder=folder / "one", arguments={"memory": MEMORY[client]} | arguments)


def assert_same(one: Trained, other: Trained) -> None:
    """The same weights to the bit. Losses are added by rank, which rounds, so they are the same to printed digits."""
    assert_same_weights(one.last, other.last)
    assert_same_weights(one.end, other.end)
    assert (one.best, one.left) == (other.best, other.left)
    for mine, theirs in zip(one.log, other.log, strict=True):
        assert mine.get("grad_norm") == theirs.get("grad_norm")
        assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.skipif(
    is_before("accelerate", "1.7"), reason="on several ranks it orders the rows of all epochs as those of the first"
)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_training_that_changes_its_ranks_has_the_bits_of_one_rank(client: str, tmp_path: Path) -> None:
    """It is saved in the middle of an epoch. Of the evaluation's losses the largest is best: that of the first step."""
    best = {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 2}
    one = training(client, tmp_path, **best)
    changing = replace(one, folder=tmp_path / "changing")
    replace(changing, until=1).on(1)
    replace(changing, until=3, resume=True).on(2)
    replace(changing, until=5, resume=True).on(1)
    through = one.on(1)
    assert_same(replace(changing, resume=True).on(3), through)
    assert (through.best, through.left) == ("checkpoint-1", ["checkpoint-1", "checkpoint-6"])


@pytest.mark.slow
def test_what_a_collator_draws_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    one = replace(training("Trainer", tmp_path, eval_strategy="no"), forgets=True)
    through = one.on(1)
    for ranks in (2, 3):
        changed = replace(one, folder=tmp_path / str(ranks))
        replace(changed, until=2).on(ranks)
        assert_same(replace(changed, resume=True).on(5 - ranks), through)


@pytest.mark.slow
def test_ranks_that_drew_the_same_do_so_when_there_are_more(tmp_path: Path) -> None:
    two = training("Trainer", tmp_path, eval_strategy="no")
    assert len({each.drawn for each in replace(two, until=2).on_each(2)}) == 1
    assert len({each.drawn for each in replace(two, resume=True).on_each(3)}) == 1


class _Draws:
    """A collator that keeps the number it has drawn for each batch."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.drawn: list[float] = []

    def __call__(self, rows: list[Any]) -> Any:
        self.drawn.append(torch.rand(()).item())
        return self.collate(rows)


def test_each_batch_of_each_epoch_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    unsaved: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no"}
    trainer = make("Trainer", tmp_path, on_protrain=True, num_train_epochs=2, max_steps=-1, **unsaved)
    collator = trainer.data_collator = _Draws(trainer.data_collator)
    trainer.train()
    assert len(set(collator.drawn)) == len(collator.drawn) == 24


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one_with_a_loss_of_the_user(tmp_path: Path) -> None:
    """It is not known to divide by what all ranks count, so gradients have their mean, which two ranks do not round."""
    one = replace(training("Trainer", tmp_path, eval_strategy="no"), own_loss=True)
    assert_same(replace(one, folder=tmp_path / "two").on(2), one.on(1))


@pytest.mark.slow
@pytest.mark.parametrize("client", MEMORY)
def test_three_ranks_log_what_they_log_without_protrain(client: str, tmp_path: Path) -> None:
    """Also in the last step of an epoch, which has two batches on each rank where the others have three."""
    arguments: dict[str, Any] = {"save_strategy": "no", "gradient_accumulation_steps": 3}
    ours = replace(training(client, tmp_path, **arguments), dropout=0.0)
    plain = replace(ours, folder=tmp_path / "plain", on_protrain=False).on(3)
    for mine, theirs in zip(ours.on(3).log, plain.log, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
