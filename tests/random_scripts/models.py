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


class Routed(Model):
    """Each batch takes a way of its own through blocks, two of which share a layer. One weight belongs to no layer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.blocks[2].second = self.blocks[0].second
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        last, skips = len(self.blocks) - int(x[0, 0] > 0), bool(x[0, 1] > 0)  # the first batch leaves out none
        x = self.enter(x) * self.gate
        for index, block in enumerate(self.blocks[:last]):
            if not (skips and index == 1):
                x = block(x)
        return self.leave(x * self.gate)


class Moving(nn.Module):
    """A layer with a mean of squares that each call in training moves, and takes part in the output."""

    mean: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(()))

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().float().square().mean(), 0.25)
        return self.inner(x) * (1 + self.mean).to(x.dtype)


class Stateful(Model):
    """Its blocks have buffers that forward changes and uses."""

    calls: Tensor

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        for block in self.blocks:
            block.register_module("first", Moving(block.get_submodule("first")))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Adapter(nn.Module):
    """A frozen layer with an adapter that can be merged into its weight, or switched off."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.used = True

    @property
    def weight(self) -> nn.Parameter:
        """The weight that scripts take for that of the layer."""
        return self.down.get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) if self.used else self.base(x)


class Adapted(Model):
    """Adapters around frozen layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.enter.requires_grad_(False)
        for block in self.blocks:
            for name in ("first", "second"):
                block.register_module(name, Adapter(block.get_submodule(name)))


OF_ONE_PROCESS = frozenset({"stateful"})  # every rank has buffers of its own

MODELS: dict[str, Callable[[int, int], Model]] = {
    "residual": Model,
    "tied": Tied,
    "routed": Routed,
    "stateful": Stateful,
    "adapted": Adapted,
}


def batch(seed: int, size: int = 8) -> Tensor:
    """Numbers [size, 8] of ``seed``."""
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
