"""Run: the state of `protrain train` between steps, and its operations, in one of the processes that train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protrain.checkpoint.adapters import Base
from protrain.checkpoint.saving import save_checkpoint
from protrain.cli.data import Batch, Tokens, counted_in, evaluation_batches
from protrain.cli.job import TrainJob
from protrain.cli.metrics import MetricsFile, added_in_order
from protrain.cli.models import LoadedModel, attention_flops_per_token
from protrain.cli.run_files import CHECKPOINTS
from protrain.distributed.ranks import Ranks


@dataclass
class Run:
    """A wrapped model, its data and how far it is trained. All ranks call its methods, in the same order."""

    job: TrainJob
    folder: Path
    loaded: LoadedModel
    tokens: Tokens
    model: Any
    optimizer: Any
    scheduler: torch.optim.lr_scheduler.LambdaLR
    device: torch.device
    sequence: int
    parameters: int
    trained_parameters: int
    ranks: Ranks
    metrics: MetricsFile
    base: Base | None  # whose weights the checkpoints leave out
    step: int  # the number of steps done

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.ranks.rank == 0

    @property
    def micro_batches(self) -> int:
        """The number of batches in one optimizer step, on all ranks together. Rank r runs number r, r + W and so on."""
        assert self.job.micro_batches is not None, "prepare has set it"
        return self.job.micro_batches

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens in one optimizer step, on all ranks together."""
        return self.job.batch * self.sequence * self.micro_batches

    @property
    def parameter_flops_per_token(self) -> int:
        """The flops per token of products with weights: two in forward, two for the gradient of what a layer reads.

        The gradient of a weight that is trained takes two more.
        """
        return 4 * self.parameters + 2 * self.trained_parameters

    @property
    def flops_per_token(self) -> int:
        """The model's flops per token, forward and backward, without recomputation."""
        return self.parameter_flops_per_token + attention_flops_per_token(self.loaded.config, self.sequence)

    @property
    def device_peak_bytes(self) -> int:
        """The most bytes that tensors took on the device. On a CPU, it is the simulated device."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self.optimizer.report().device_bytes

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean next-token loss of the counted tokens in ``batch``. The model shifts the labels itself."""
        loss: torch.Tensor = self.model(**self.loaded.arguments(batch)).loss
        return loss

    def evaluate(self) -> float | None:
        """The mean loss over the held-out batches, which also goes to metrics.jsonl. None if nothing is held out.

        Each batch is on one rank. As all ranks must call the model equally often, one without a batch runs the last one
        too, and its loss does not count.
        """
        job, ranks = self.job, self.ranks
        batches = list(
            evaluation_batches(self.tokens, batch=job.batch, sequence=self.sequence, count=job.evaluation_batches)
        )
        if not batches:
            return None
        counted = [counted_in(batch) for batch in batches]
        losses = []
        self.model.eval()
        with torch.no_grad():
            for first in range(0, len(batches), ranks.size):
                index = min(first + ranks.rank, len(batches) - 1)
                loss = self.loss(batches[index]) * counted[index]
                losses.append(loss if index == first + ranks.rank else torch.zeros(()))
        self.model.train()
        mean = added_in_order(ranks.all_values([float(loss) for loss in losses])) / sum(counted)
        if self.writes:
            self.metrics.add({"step": self.step, "evaluation_loss": mean})
        return mean

    def wait_for_updates(self) -> None:
        """Wait until the last step's updates are done. ``optimizer.step()`` does not wait for those on the host."""
        self.optimizer._engine.updates.wait()

    def save(self) -> Path:
        """Write a checkpoint and return its folder."""
        return save_checkpoint(
            self.folder / CHECKPOINTS,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            extra={"step": self.step, "data_crc32": self.tokens.crc32},
            keep=self.job.keep,
            base=self.base,
        )
