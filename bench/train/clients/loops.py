"""Clients whose users write the loop or its step: plain PyTorch, Lightning's Trainer, Fabric, and Accelerate."""

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


def _lightning_arguments(run: Run, strategy: type[Any]) -> dict[str, Any]:
    """What the Trainer of Lightning and Fabric are both told."""
    plain = "ddp" if run.several else "auto"
    return {
        "accelerator": "cuda" if run.on_gpu else "cpu",
        "devices": run.task.gpus,
        "precision": "bf16-mixed" if run.on_gpu else "32-true",
        "strategy": strategy(**run.options) if run.on_protrain else plain,
    }


def fabric(run: Run) -> None:
    """Fabric's loop."""
    import lightning

    from protrain.integrations.lightning import ProTrainFabricStrategy

    with_fabric = lightning.Fabric(**_lightning_arguments(run, ProTrainFabricStrategy))
    with_fabric.launch()
    plain = run.model()
    model, optimizer = with_fabric.setup(plain, run.adamw(plain))
    for ids in with_fabric.setup_dataloaders(run.loader(of_all_ranks=True)):
        loss = model(input_ids=ids, labels=ids).loss
        with_fabric.backward(loss)
        with_fabric.clip_gradients(model, optimizer, max_norm=run.task.clip_norm)
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
        **_lightning_arguments(run, ProTrainStrategy),
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
    "fabric": fabric,
    "lightning": lightning_trainer,
}
