"""``auto_find_batch_size`` of the Trainer takes a batch for which there is a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import protrain
from protrain.integrations.transformers import ProTrainTrainer
from tests.distributed.pool import on_ranks
from tests.integrations.clients import llama


def train(
    folder: Path, batch: int, memory: str, *, bf16: bool = False, finds: bool = True
) -> tuple[int, dict[str, Any]]:
    """The batch that was trained with, and the weights."""
    rows = [{"input_ids": (row := torch.randint(90, (64,))).tolist(), "labels": row.tolist()} for _ in range(96)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        auto_find_batch_size=finds,
        max_steps=2,
        bf16=bf16,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = ProTrainTrainer(model=llama(), args=arguments, train_dataset=rows, protrain={"device_memory": memory})
    trainer.train()
    return trainer.state.train_batch_size, trainer.model.state_dict()


def train_on_rank(rank: int, folder: Path) -> int:
    torch.manual_seed(0)
    return train(folder, 16, "2MiB")[0]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_training_is_that_with_the_found_batch(bf16: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    found, weights = train(tmp_path, 16, "1536KiB", bf16=bf16)
    assert found < 16
    torch.manual_seed(0)
    same, expected = train(tmp_path, found, "1536KiB", bf16=bf16, finds=False)
    assert same == found
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_all_ranks_find_one(tmp_path: Path) -> None:
    one, other = on_ranks(2, train_on_rank, tmp_path, timeout_s=150)
    assert one == other < 16


@pytest.mark.parametrize(("memory", "finds"), [("2MiB", False), ("20KiB", True)])
def test_without_it_or_where_no_batch_fits_the_error_says_what_does(memory: str, finds: bool, tmp_path: Path) -> None:
    with pytest.raises(protrain.PlanError, match="no plan fits the device memory"):
        train(tmp_path, 16, memory, finds=finds)
