"""A step under autocast: its casts end with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import protrain

WIDTH, LAYERS = 32, 3


class _CastsOfWeights(TorchDispatchMode):
    """Counts how often a weight is cast to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        self.count += is_cast and result.shape == (WIDTH, WIDTH)
        return result


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def test_casts_of_weights_do_not_outlast_a_step() -> None:
    """Autocast keeps them until its context ends, which is around all of the profile here."""
    with torch.autocast("cpu", dtype=torch.bfloat16), _CastsOfWeights() as casts:
        protrain.profile(Layers(), {"x": torch.randn(4, WIDTH)}, device="cpu", dtype=torch.float32)
        assert casts.count >= 2 * LAYERS, "in the step that is measured, and in each one that is timed"
