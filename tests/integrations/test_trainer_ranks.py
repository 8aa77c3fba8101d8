"""The Trainers on ProTrain have the same bits on any number of ranks, and go on on another number of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from tests.distributed.pool import errors_on, on_ranks
from tests.engine.harness import assert_same
from tests.integrations.clients import is_before, make

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


# Device memory in which there is a plan for any number of ranks.
MEMORY = {"Trainer": "1.5MiB", "SFT": "1.5MiB", "SFT with LoRA": "1.5MiB", "DPO": "18MiB"}
CLIENTS = ["Trainer", *(pytest.param(each, marks=pytest.mark.slow) for each in MEMORY if each != "Trainer")]
pytestmark = pytest.mark.filterwarnings("ignore:gradient checkpointing of:UserWarning", "ignore::FutureWarning")


def training(client: str, folder: Path, **arguments: Any) -> Training:
    return Training(client=client, folder=folder / "one", arguments={"memory": MEMORY[client]} | arguments)


def assert_same_trainings(one: Trained, other: Trained) -> None:
    """The same weights to the bit. Losses are added by rank, which rounds, so they are the same to printed digits."""
    assert_same(one.last, other.last)
    assert_same(one.end, other.end)
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
    assert_same_trainings(replace(changing, resume=True).on(3), through)
    assert (through.best, through.left) == ("checkpoint-1", ["checkpoint-1", "checkpoint-6"])


@pytest.mark.slow
def test_what_a_collator_draws_does_not_depend_on_the_ranks(tmp_path: Path) -> None:
    one = replace(training("Trainer", tmp_path, eval_strategy="no"), forgets=True)
    through = one.on(1)
    for ranks in (2, 3):
        changed = replace(one, folder=tmp_path / str(ranks))
        replace(changed, until=2).on(ranks)
        assert_same_trainings(replace(changed, resume=True).on(5 - ranks), through)


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
    assert_same_trainings(replace(one, folder=tmp_path / "two").on(2), one.on(1))


@pytest.mark.slow
@pytest.mark.parametrize("client", MEMORY)
def test_three_ranks_log_what_they_log_without_protrain(client: str, tmp_path: Path) -> None:
    """Also in the last step of an epoch, which has two batches on each rank where the others have three."""
    arguments: dict[str, Any] = {"save_strategy": "no", "gradient_accumulation_steps": 3}
    ours = replace(training(client, tmp_path, **arguments), dropout=0.0)
    plain = replace(ours, folder=tmp_path / "plain", on_protrain=False).on(3)
    for mine, theirs in zip(ours.on(3).log, plain.log, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)


# -- callbacks that read the whole model -------------------------------------------------------------------------------


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


def first_alone(rank: int, what: str, folder: Path) -> None:
    """A training with a callback that reads a weight or saves the model on the first rank only."""
    # The Trainer would wait for the first rank in collectives of its own, which end when that rank's process ends.
    alone: dict[str, Any] = {"average_tokens_across_devices": False, "logging_steps": 100}
    trainer = make("Trainer", folder, on_protrain=True, **alone, **UNSAVED)
    acts: dict[str, Callable[[], object]] = {
        "a read of model.embed_tokens.weight": lambda: next(iter(trainer.model.parameters())).sum().item(),
        "save_model()": lambda: trainer.save_model(str(folder / "saved")),
    }
    trainer.add_callback(FirstAlone(acts[what]))
    trainer.train()


@pytest.mark.slow
def test_averages_are_the_same_on_all_ranks_and_as_without_protrain(tmp_path: Path) -> None:
    ours, other = on_ranks(2, averages_on_rank, tmp_path / "ours", True)
    plain, _ = on_ranks(2, averages_on_rank, tmp_path / "plain", False)
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(other[name], ours[name]), name
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a read of model.embed_tokens.weight", "save_model()"])
def test_what_one_rank_does_alone_is_refused_on_all(what: str, tmp_path: Path) -> None:
    for error in errors_on(2, first_alone, what, tmp_path):
        assert error.startswith("MisuseError: ")
        assert f"rank 0 came to {what}" in error
