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

from tests.distributed.training import set_dropout
from tests.engine import residual

lightning = pytest.importorskip("lightning")

ROWS, STEPS = 4, 6


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


def network() -> nn.Module:
    return set_dropout(residual.make(width=32, depth=12), 0.0)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(48, 8, generator=generator)
    return DataLoader(TensorDataset(rows, rows[:, :4]), batch_size=ROWS)


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


def make_trainer(folder: Path, strategy: Any, **arguments: Any) -> Any:
    settings = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", 1)),
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
    return lightning.Trainer(**(settings | arguments))


def fit(folder: Path, strategy: Any, *, resume: Path | None = None, **arguments: Any) -> Run:
    module, trainer, size = Module(), make_trainer(folder, strategy, **arguments), os.environ.get("WORLD_SIZE")
    trainer.fit(module, loader(), loader(), ckpt_path=resume and str(resume))
    trainer.save_checkpoint(folder / "end.ckpt")
    epoch = trainer.callback_metrics.get("loss_epoch")
    losses = [*module.losses, *([] if epoch is None else [float(epoch)])]
    if size is not None:
        os.environ["WORLD_SIZE"] = size  # which Lightning deletes when it has trained
    return Run(losses, {name: value.clone() for name, value in module.state_dict().items()})


def fit_on_rank(rank: int, folder: Path, on_protrain: bool, **arguments: Any) -> Run:
    return fit(folder, protrain_strategy() if on_protrain else "ddp", **arguments)


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
    run = fit_on_rank(rank, folder, on_protrain, callbacks=[callback], gradient_clip_val=0.5)
    return run, callback.norms


def fit_with_more_batches_on_rank(rank: int, folder: Path, on_protrain: bool) -> Run:
    """A run of two epochs, of which the second has steps of three batches."""
    schedule = lightning.pytorch.callbacks.GradientAccumulationScheduler({1: 3})
    return fit_on_rank(rank, folder, on_protrain, callbacks=[schedule], max_steps=8)


def protrain_strategy(memory: str = "0.3MiB", **arguments: Any) -> Any:
    from protrain.integrations.lightning import ProTrainStrategy

    return ProTrainStrategy(device_memory=memory, progress=False, **arguments)
