"""Run: what `protrain train` holds between steps, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protrain.checkpoint.checkpoints import save_checkpoint
from protrain.cli.data import Tokens, evaluation_batches
from protrain.cli.files import CHECKPOINTS
from protrain.cli.job import TrainJob
from protrain.cli.metrics import MetricsFile
from protrain.cli.models import LoadedModel, attention_flops_per_token


@dataclass
class Run:
    """A wrapped model, its data and its position."""

    job: TrainJob
    folder: Path
    loaded: LoadedModel
    tokens: Tokens
    model: Any
    optimizer: Any
    scheduler: torch.optim.lr_scheduler.LambdaLR
    device: torch.device
    dtype: torch.dtype
    sequence: int
    parameters: int
    metrics: MetricsFile
    step: int  # steps done

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.job.batch * self.sequence * self.job.accumulation

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the model for one token, forward and backward, without recomputation."""
        return 6 * self.parameters + attention_flops_per_token(self.loaded.config, self.sequence)

    @property
    def device_peak_bytes(self) -> int:
        """The most that tensors took on the device; on a CPU, of the simulated one."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        device_bytes: int = self.optimizer.report().device_bytes
        return device_bytes

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss of ``ids`` [batch, sequence]; the model shifts the labels itself."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def evaluate(self) -> float | None:
        """Mean loss over the held-out batches, also into metrics.jsonl; None when nothing is held out."""
        job = self.job
        total, count = torch.zeros((), device=self.device), 0
        self.model.eval()
        with torch.no_grad():
            for ids in evaluation_batches(
                self.tokens, batch=job.batch, sequence=self.sequence, count=job.evaluation_batches
            ):
                total += self.loss(ids) * len(ids)
                count += len(ids)
        self.model.train()
        if not count:
            return None
        loss = float(total) / count
        self.metrics.add({"step": self.step, "evaluation_loss": loss})
        return loss

    def wait_for_updates(self) -> None:
        """Return once the last step's updates are done; ``optimizer.step()`` does not wait for those on the host."""
        self.optimizer._engine.wait_for_updates()

    def save(self) -> Path:
        """Write a checkpoint; returns its folder."""
        return save_checkpoint(
            self.folder / CHECKPOINTS,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            extra={"step": self.step, "data_crc32": self.tokens.crc32},
            keep=self.job.keep,
        )
