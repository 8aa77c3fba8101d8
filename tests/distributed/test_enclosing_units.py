"""A module with weights of its own around others, on two ranks within the least memory that a plan exists for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.distributed.pool import on_ranks
from tests.distributed.test_user_wrap import WIDTH, Block, batch, wrap
from tests.engine.harness import seeded


class Embeddings(nn.Module):
    """As the embeddings of a vision transformer, whose position weights are added to those of its inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        inner: Tensor = self.inner(value)
        return inner + self.position


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value = self.embeddings(value)
        for block in self.blocks:
            value = block(value)
        return value.square().mean()


def losses(rank: int, device_memory: int | str) -> list[float]:
    """Of three steps in which both ranks have equal batches."""
    with seeded():
        model, optimizer = wrap(Vision(), device_memory=device_memory)
    found = []
    for step in range(3):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def least_memory(rank: int) -> int:
    with pytest.raises(protrain.PlanError) as refused:
        losses(rank, "1KiB")
    return refused.value.needed_bytes


def test_the_least_memory_holds_the_enclosing_weights_during_the_whole_backward() -> None:
    [needed_bytes, _] = on_ranks(2, least_memory)
    alone = losses(0, "64MiB")
    for device_memory in (needed_bytes, 2 * needed_bytes, "64MiB"):
        assert on_ranks(2, losses, device_memory) == [alone, alone]
