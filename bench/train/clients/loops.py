"""Clients whose users write the loop or its step: plain PyTorch, Lightning's Trainer, and Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import protrain
from bench.train.clients.run import Run
from bench.train.ranks import start_group


def loop(run: Run) -> None:
    """A loop of PyTorch alone."""
    model = run.model()
    optimizer: Any = run.adamw(model)
    if run.on_protrain:
        model, optimizer = protrain.wrap(model, optimizer, **run.options)
    elif run.several:
        start_group("nccl" if run.on_gpu else "gloo")
        model = nn.parallel.DistributedDataParallel(model)
    for rows in run.loader():
        ids = rows.to(run.device, non_blocking=True)
        with run.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.task.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach())


def accelerate(run: Run) -> None:
    """Accelerate's loop, in which ProTrain wraps before Accelerate prepares."""
    from accelerate import Accelerator

    from protrain.integrations.accelerate import wrap

    accelerator = Accelerator(cpu=not run.on_gpu, mixed_precision="bf16" if run.on_gpu else "no")
    model = run.model()
    optimizer: Any = run.adamw(model)
    if run.on_protrain:
        model, optimizer = wrap(accelerator, model, optimizer, **run.options)
    model, optimizer, loader = accelerator.prepare(model, optimizer, run.loader(of_all_ranks=True))
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), run.task.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach())


def lightning_trainer(run: Run) -> None:
    """A LightningModule in Lightning's Trainer.

    The Trainer refuses to clip the gradients of a fused optimizer in mixed precision, so AdamW is not fused here.
    """
    import lightning

    from protrain.integrations.lightning import ProTrainStrategy

    base: Any = lightning.LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model()

        def training_step(self, ids: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(input_ids=ids, labels=ids).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.adamw(self, fused=False)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            run.losses.append(outputs["loss"].detach())

    trainer = lightning.Trainer(
        accelerator="cuda" if run.on_gpu else "cpu",
        devices=run.task.gpus,
        precision="bf16-mixed" if run.on_gpu else "32-true",
        strategy=ProTrainStrategy(**run.options) if run.on_protrain else "ddp" if run.several else "auto",
        max_epochs=1,
        gradient_clip_val=run.task.clip_norm,
        default_root_dir=run.folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Module(), run.loader(of_all_ranks=True))


LOOPS: dict[str, Callable[[Run], None]] = {
    "loop": loop,
    "accelerate": accelerate,
    "lightning": lightning_trainer,
}
