"""The models of random scripts, and their batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.engine.residual import Model

WIDTH, DEPTH = 24, 4


class Tied(Model):
    """The last layer reads through the weight of the first, and one block is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.leave(x) + nn.functional.linear(x, self.enter.weight.t()).sum(-1, keepdim=True)


class Counting(Model):
    """It has a BatchNorm, and a buffer that counts its calls."""

    calls: Tensor

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * (1 + 0.01 * self.calls)


class Branching(Model):
    """It leaves out a block for batches of an odd size."""

    def forward(self, x: Tensor) -> Tensor:
        odd = x.shape[0] % 2
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if not (odd and index == 2):
                x = block(x)
        return self.leave(x)


class Headed(Model):
    """Its usual output takes the weight of its head, and its scores come from a call of the head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.head = nn.Linear(4, 4)
        self.scores = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.head(x) if self.scores else nn.functional.linear(x, self.head.weight)


MODELS: dict[str, Callable[[int, int], Model]] = {
    "residual": Model,
    "tied": Tied,
    "counting": Counting,
    "branching": Branching,
    "headed": Headed,
}


def batch(seed: int, size: int = 8) -> Tensor:
    """Numbers [size, 8] of ``seed``."""
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
