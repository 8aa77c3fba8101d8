"""What a client is given to train with, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.train.models import build_model, fill
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Task
from bench.train.trainers import weight_dtype


@dataclass(kw_only=True)
class Run:
    """One training by one client, with or without ProTrain, on one GPU or as one rank of several.

    Every client trains each row once, in batches of ``task.batch`` rows for each rank, and clips to the task's norm.
    Without ProTrain it does what its users do: fp32 weights, bf16 autocast on a GPU, fused AdamW, and
    DistributedDataParallel between several ranks.
    """

    task: Task
    on_protrain: bool
    device: torch.device
    rank: int
    rows: Tensor  # [rows, sequence] int64 token ids, on the CPU: those of all ranks, step by step
    folder: Path  # for what a client writes
    losses: list[Tensor] = field(default_factory=list)  # of each step, on this rank, still on the device

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU, and so bf16."""
        return self.device.type == "cuda"

    @property
    def several(self) -> bool:
        """Whether other ranks train too."""
        return self.task.gpus > 1

    @property
    def total_steps(self) -> int:
        """The steps that a client trains: those that warm up and those that are timed."""
        return self.task.warm_up + self.task.steps

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of protrain.wrap. Logits are whole, as they are without ProTrain."""
        limits = {"device_memory": self.task.device_memory, "host_memory": self.task.host_memory}
        return {**limits, "chunked_loss": False}

    def model(self) -> Any:
        """The seeded model with fp32 weights that are exact in bf16, so that both ways to train start alike.

        It lies where users have it: on the device, and for ProTrain, which places it, on the CPU.
        """
        model = build_model(self.task)
        fill(model, device=self.device, dtype=weight_dtype(self.device))
        model = model.float().to("cpu" if self.on_protrain else self.device)
        if self.on_gpu:
            torch.cuda.empty_cache()  # a plan is made for what is free
        return model

    def adamw(self, model: nn.Module, *, fused: bool = True) -> torch.optim.AdamW:
        """The optimizer of a loop."""
        rate = self.task.learning_rate
        return torch.optim.AdamW(
            model.parameters(), lr=rate, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=fused or None
        )

    def loader(self, *, of_all_ranks: bool = False) -> Iterable[Any]:
        """Batches [batch, sequence] of this rank, or of all ranks, where the client divides them."""
        rows: Any = self.rows if of_all_ranks else self.rows[self.rank :: self.task.gpus]
        return torch.utils.data.DataLoader(rows, batch_size=self.task.batch, pin_memory=self.on_gpu)

    def autocast(self) -> torch.autocast:
        """What a loop computes its loss in: ProTrain's weights need no autocast."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu and not self.on_protrain)
