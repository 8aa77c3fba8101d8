"""``auto_find_batch_size`` of the Trainer takes a batch for which there is a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

import protrain
from protrain.integrations.transformers import ProTrainTrainer
from tests.distributed.pool import on_ranks
from tests.integrations.clients import llama
from tests.integrations.test_trainer_saves import assert_same_weights


def train(folder: Path, batch: int, memory: str, *, finds: bool = True) -> tuple[int, dict[str, Tensor]]:
    """The batch that was trained with, and the weights."""
    torch.manual_seed(0)
    rows = [{"input_ids": (row := torch.randint(90, (64,))).tolist(), "labels": row.tolist()} for _ in range(96)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        auto_find_batch_size=finds,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = ProTrainTrainer(model=llama(), args=arguments, train_dataset=rows, protrain={"device_memory": memory})
    trainer.train()
    return trainer.state.train_batch_size, dict(trainer.model.state_dict())


def train_on_rank(rank: int, folder: Path, batch: int, finds: bool) -> tuple[int, dict[str, Tensor]]:
    return train(folder, batch, "2MiB", finds=finds)


def test_all_ranks_find_one_and_train_as_with_it(tmp_path: Path) -> None:
    (batch, weights), (other, _) = on_ranks(2, train_on_rank, tmp_path, 16, True)
    assert batch == other < 16
    for _, expected in on_ranks(2, train_on_rank, tmp_path, batch, False):
        assert_same_weights(weights, expected)


@pytest.mark.parametrize(("memory", "finds"), [("2MiB", False), ("20KiB", True)])
def test_without_it_or_where_no_batch_fits_the_error_says_what_does(memory: str, finds: bool, tmp_path: Path) -> None:
    with pytest.raises(protrain.PlanError, match="no plan fits the device memory"):
        train(tmp_path, 16, memory, finds=finds)
