"""The Trainer of transformers takes what protrain.wrap returns like any model and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, BATCH, ACCUMULATE = 6, 2, 2


def trained(
    tiny_model: Callable[..., nn.Module],
    folder: Path,
    device_memory: str | None,
    *,
    resume: Path | None = None,
    **arguments: Any,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Returns what was logged, and the final weights."""
    model: Any = tiny_model("llama")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(3, 96, (24, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    if device_memory is not None:
        model, optimizer = protrain.wrap(
            model,
            optimizer,
            example_batch=dict.fromkeys(("input_ids", "labels"), tokens[:BATCH]),
            device="cpu",
            device_memory=device_memory,
            accumulation=ACCUMULATE,
            progress=False,
        )
        offloaded = optimizer.plan.n_persist < optimizer.plan.n_chunks
        assert offloaded == (device_memory == "0.5MiB"), optimizer.plan
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    trainer = transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=data,
        eval_dataset=data[:4],
        optimizers=(optimizer, scheduler),
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate")
    log = [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history[:-1]]
    return log, {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_it_trains_clips_saves_and_resumes(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    plain, _ = trained(tiny_model, tmp_path / "plain", None, max_grad_norm=0.1, save_strategy="no")
    log, weights = trained(tiny_model, tmp_path / "whole", "64MiB", max_grad_norm=0.1, save_strategy="no")
    assert len(log) == STEPS + 2
    for ours, theirs in zip(log, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    folder = tmp_path / "offloaded"
    offloaded, others = trained(tiny_model, folder, "0.5MiB", max_grad_norm=0.1, save_steps=3)
    assert offloaded == log
    resumed, again = trained(
        tiny_model, folder, "64MiB", max_grad_norm=0.1, save_steps=3, resume=folder / "checkpoint-3"
    )
    assert resumed == log
    for name, value in weights.items():
        assert torch.equal(others[name], value), name
        assert torch.equal(again[name], value), name


def test_a_norm_is_logged_where_nothing_is_clipped(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    plain, _ = trained(tiny_model, tmp_path / "plain", None, max_grad_norm=0, save_strategy="no")
    log, _ = trained(tiny_model, tmp_path / "offloaded", "0.5MiB", max_grad_norm=0, save_strategy="no")
    for ours, theirs in zip(log, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
