"""A small residual model with dropout, any of whose blocks can be told to fail, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import harness
from tests.engine.harness import Batch, Spec, adamw, seeded, wrap_under


class Block(nn.Module):
    """A residual block with dropout; ``fails`` may be "forward" or "backward", where it raises ``error``."""

    error: type[BaseException] = ArithmeticError

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.first(self.norm(x))))
        if self.fails == "forward":
            raise self.error("forward fails")
        if self.fails == "backward" and hidden.requires_grad:
            hidden.register_hook(self._fail)
        return x + self.second(hidden)

    def _fail(self, _: Tensor) -> Tensor:
        raise self.error("backward fails")


class Model(nn.Module):
    """A layer, blocks that ``block(width)`` makes, and a layer."""

    def __init__(self, width: int, depth: int, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def make(width: int = 48, depth: int = 5, block: Callable[[int], nn.Module] = Block) -> nn.Module:
    with seeded():
        return Model(width, depth, block)


def batches(count: int = 6, shape: tuple[int, ...] = (16, 8)) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator),) for _ in range(count)]


def wrapped(spec: Spec, **options: Any) -> tuple[nn.Module, ProTrainOptimizer]:
    """The model, wrapped under ``spec``."""
    model = make()
    return wrap_under(spec, model, adamw(model), batches(1)[0], **options)


def unharmed(spec: Spec, **options: Any) -> AbstractContextManager[tuple[Any, ProTrainOptimizer]]:
    """``harness.unharmed`` for the model and three batches."""
    return harness.unharmed(spec, make, batches(3), **options)
