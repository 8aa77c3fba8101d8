"""``auto_find_batch_size`` of the Trainer takes a batch for which there is a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

import protrain
from protrain.integrations.transformers import ProTrainTrainer
from tests.distributed.pool import on_ranks
from tests.integrations.clients import llama


def train(folder: Path, batch: int, memory: str, *, finds: bool = True) -> int:
    """The batch that was trained with."""
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
    batch_size: int = trainer.state.train_batch_size
    return batch_size


def train_on_rank(rank: int, folder: Path) -> int:
    torch.manual_seed(0)
    return train(folder, 16, "2MiB")


def test_all_ranks_find_one(tmp_path: Path) -> None:
    one, other = on_ranks(2, train_on_rank, tmp_path)
    assert one == other < 16


@pytest.mark.parametrize(("memory", "finds"), [("2MiB", False), ("20KiB", True)])
def test_without_it_or_where_no_batch_fits_the_error_says_what_does(memory: str, finds: bool, tmp_path: Path) -> None:
    with pytest.raises(protrain.PlanError, match="no plan fits the device memory"):
        train(tmp_path, 16, memory, finds=finds)
