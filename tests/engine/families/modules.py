"""Modules that no library brought: what people write themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.families.family import VOCABULARY, Batch, Draw, Family, ids


class Translator(nn.Module):
    """torch's own nn.Transformer between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, 32)
        self.target = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the next target token."""
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


class Residual(nn.Module):
    """Two convolutions with batch norms and a shortcut, as in torchvision's BasicBlock."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        shortcut = x if self.downsample is None else self.downsample(x)
        out += shortcut
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """Four blocks in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(16, 16, 1), Residual(16, 16, 1))
        self.layer2 = nn.Sequential(Residual(16, 32, 2), Residual(32, 32, 1))
        self.fc = nn.Linear(32, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(pixels)))))
        logits: Tensor = self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))
        return logits


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


class GraphLayer(nn.Module):
    """Sends messages along edges and adds them up at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(64, 32)
        self.update = nn.GRUCell(32, 32)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """The nodes after one round."""
        message = torch.relu(self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)))
        arrived = torch.zeros_like(nodes).index_add(0, edges[1], message)
        updated: Tensor = self.update(arrived, nodes)
        return updated


class Graph(nn.Module):
    """A class for every node."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(8, 32)
        self.rounds = nn.ModuleList([GraphLayer() for _ in range(3)])
        self.decode = nn.Linear(32, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.encode(nodes)
        for layer in self.rounds:
            x = layer(x, edges)
        logits: Tensor = self.decode(x)
        return logits


def _sentences(g: torch.Generator) -> Batch:
    return {"source": ids(g), "target": ids(g)}


def _pictures(g: torch.Generator) -> Batch:
    return {"pixels": torch.randn(2, 3, 16, 16, generator=g)}


def _noise(g: torch.Generator) -> Batch:
    return {"noisy": torch.randn(2, 3, 16, 16, generator=g), "step": torch.randint(100, (2,), generator=g)}


def _tokens(g: torch.Generator) -> Batch:
    return {"tokens": ids(g)}


def _graphs(g: torch.Generator) -> Batch:
    return {"nodes": torch.randn(12, 8, generator=g), "edges": torch.randint(12, (2, 30), generator=g)}


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the logits with a class that follows from the place: a loss outside the model."""
    logits = model(**batch).flatten(0, -2)
    return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device) % logits.shape[-1])


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    tokens: Tensor = batch["target"] if "target" in batch else batch["tokens"]
    return functional.cross_entropy(model(**batch)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().to(tokens.device))


def _denoised(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(**batch), batch["noisy"])


def families() -> list[Family]:
    """All of them."""
    table: list[tuple[str, Callable[[], nn.Module], Draw, Callable[[nn.Module, Batch], Tensor]]] = [
        ("nn.Transformer", Translator, _sentences, _next_token),
        ("ResNet", ResNet, _pictures, _classified),
        ("diffusion UNet", UNet, _noise, _denoised),
        ("LSTM", Recurrent, _tokens, _next_token),
        ("graph network", Graph, _graphs, _classified),
    ]
    return [Family(name=name, make=make, draw=draw, loss=loss) for name, make, draw, loss in table]
