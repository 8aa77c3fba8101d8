"""Modules that no library brought: what people write themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.families.family import VOCABULARY, Batch, Family, ids


class Level(nn.Module):
    """A convolution that is told the time, and attention over all places."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, inputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(32, outputs)
        self.attention = nn.MultiheadAttention(outputs, 4, batch_first=True)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The output of the block, which has the shape of ``x`` but for the channels."""
        x = self.conv(functional.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        flat = x.flatten(2).transpose(1, 2)
        attended: Tensor = self.attention(flat, flat, flat, need_weights=False)[0]
        return x + attended.transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """Predicts the noise in pictures. What a level hands down comes back to the level of its size on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.SiLU())
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.ModuleList([Level(16, 16), Level(16, 32)])
        self.middle = Level(32, 32)
        self.up = nn.ModuleList([Level(64, 16), Level(32, 16)])
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, noisy: Tensor, step: Tensor) -> Tensor:
        """The noise."""
        time = self.time(step)
        x, kept = self.first(noisy), []
        for level in self.down:
            x = level(x, time)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for level in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = level(torch.cat([x, kept.pop()], 1), time)
        noise: Tensor = self.last(x)
        return noise


class Recurrent(nn.Module):
    """A language model of stacked LSTMs whose head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList([nn.LSTM(32, 32, batch_first=True) for _ in range(3)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        logits: Tensor = self.head(self.norm(x))
        return logits


def _noise(g: torch.Generator) -> Batch:
    return {"noisy": torch.randn(2, 3, 16, 16, generator=g), "step": torch.randint(100, (2,), generator=g)}


def _tokens(g: torch.Generator) -> Batch:
    return {"tokens": ids(g)}


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(**batch)[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


def _denoised(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(**batch), batch["noisy"])


def families() -> list[Family]:
    """All of them."""
    return [
        Family(name="diffusion UNet", make=UNet, draw=_noise, loss=_denoised),
        Family(name="LSTM", make=Recurrent, draw=_tokens, loss=_next_token),
    ]
