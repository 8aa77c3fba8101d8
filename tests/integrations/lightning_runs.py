"""Trainings of a small model by Lightning's Trainer, plain and on ProTrain."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

WIDTH, ROWS, STEPS = 32, 4, 6


@dataclass(frozen=True)
class Run:
    """The losses that a training has logged, and its final weights."""

    losses: list[float]
    weights: dict[str, Tensor]


def assert_close(ours: Run, plain: Run) -> None:
    """The first losses are the same bits, and later ones differ by the rounding of torch's own AdamW."""
    assert ours.losses[0] == plain.losses[0]
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert ours.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert ours.weights[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(48, WIDTH, generator=generator)
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=ROWS)


LightningModule: Any = lightning.LightningModule


class Module(LightningModule):
    """Its steps call the network, not the module itself, as most do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.mse_loss(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", F.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def fit(folder: Path, strategy: Any, *, resume: Path | None = None, devices: int = 1, **arguments: Any) -> Run:
    module = Module()
    settings = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": strategy,
        "max_steps": STEPS,
        "num_sanity_val_steps": 0,
        "val_check_interval": 3,
        "default_root_dir": folder,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
    }
    trainer = lightning.Trainer(**(settings | arguments))
    trainer.fit(module, loader(), loader(), ckpt_path=resume and str(resume))
    trainer.save_checkpoint(folder / "end.ckpt")
    epoch = trainer.callback_metrics.get("loss_epoch")
    losses = [*module.losses, *([] if epoch is None else [float(epoch)])]
    return Run(losses, {name: value.clone() for name, value in module.state_dict().items()})


def fit_on_rank(rank: int, folder: Path, on_protrain: bool, resume: Path | None, **arguments: Any) -> Run:
    size = os.environ["WORLD_SIZE"]  # which Lightning deletes when it has trained
    strategy = protrain_strategy() if on_protrain else "ddp"
    try:
        return fit(folder, strategy, resume=resume, devices=int(size), **arguments)
    finally:
        os.environ["WORLD_SIZE"] = size


Callback: Any = lightning.Callback


class Norms(Callback):
    """Reads the norms of all weights between steps, as callbacks do that log them."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def _read(self, trainer: Any, module: Any, *_: Any) -> None:
        self.norms += [float(weight.detach().norm()) for weight in module.parameters()]

    on_train_start = on_after_backward = on_before_optimizer_step = on_train_batch_end = on_validation_end = _read


def norms_on_rank(rank: int, folder: Path, on_protrain: bool) -> tuple[Run, list[float]]:
    """A run with ``Norms``, and the norms that it has read."""
    callback = Norms()
    run = fit_on_rank(rank, folder, on_protrain, None, callbacks=[callback], gradient_clip_val=0.5)
    return run, callback.norms


def fit_with_more_batches_on_rank(rank: int, folder: Path, on_protrain: bool) -> Run:
    """A run of two epochs, of which the second has steps of three batches."""
    schedule = lightning.pytorch.callbacks.GradientAccumulationScheduler({1: 3})
    return fit_on_rank(rank, folder, on_protrain, None, callbacks=[schedule], max_steps=8)


def protrain_strategy(memory: str = "0.3MiB", **arguments: Any) -> Any:
    from protrain.integrations.lightning import ProTrainStrategy

    return ProTrainStrategy(device_memory=memory, progress=False, **arguments)
