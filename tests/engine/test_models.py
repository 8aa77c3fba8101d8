"""Models of every structure have the plain loop's bits: what the modules do with parameters is theirs to decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.harness import Batch, Loop, check_equal_to_plain, default_loss, seeded

WIDTH = 24


class Block(nn.Module):
    """A pre-norm MLP block with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Embedding, blocks, head: the base of most models here."""

    def __init__(self, blocks: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.trunk(tokens)).float().flatten(0, 1), tokens.flatten())


class SeveralLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.branches = nn.ModuleDict({name: Block() for name in "ab"})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        x = self.second(x)
        return self.branches["b"](x) + self.branches["a"](x)


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(WIDTH, 4, batch_first=True)  # uses its out_proj without calling it
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0]


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 40)
        self.scale = nn.Parameter(torch.ones(40))
        self.recurrent = nn.GRU(40, 16, batch_first=True)
        self.last = nn.Bilinear(16, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.recurrent(torch.tanh(self.first(x)) * self.scale)[0]
        return self.last(x, x)


class Relaid(nn.Module):
    """Gives its weights storage of their own in every forward, as recurrent modules do on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, 8, batch_first=True)
        self.last = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.recurrent.flatten_parameters()
        self.last.weight.data = self.last.weight.data.clone()
        return self.last(self.recurrent(x)[0])


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvBlock() for _ in range(4)))
        self.norm = nn.BatchNorm2d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.stem(x))).mean((2, 3))


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = Stack().requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        for name in ("up", "down"):
            base = getattr(block, name)
            setattr(block, name, Adapter(base))
    return model


class Mixture(nn.Module):
    """Experts of which some get no token, hence no gradient, in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mask = chosen == index
            result[mask] = self.experts[index](x[mask]) * weights[mask].unsqueeze(-1)
        return result


class Functional(Stack):
    """Uses the embedding's weight and a block's weight outside their modules."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.trunk(tokens)
        first = self.blocks[0]
        assert isinstance(first, Block)
        logits = F.linear(x, self.embed.weight) + F.linear(first.up.weight.sum(0) * x, self.head.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class Unused(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.speculative_states = nn.Linear(WIDTH, WIDTH)
        self.spare_blocks = nn.ModuleList(Block() for _ in range(2))


class Twice(Stack):
    """Calls every block twice, the last one once more."""

    def trunk(self, tokens: Tensor) -> Tensor:
        return self.blocks[-1](super().trunk(tokens) + self._again(tokens))

    def _again(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flip(1)
        for block in reversed(list(self.blocks)):
            x = block(x)
        return x


class Counting(Stack):
    """Integer parameters, and buffers that forward uses and updates."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.calls: Tensor
        self.mean: Tensor

    def trunk(self, tokens: Tensor) -> Tensor:
        x = super().trunk(tokens)[..., self.order]
        self.calls += 1
        self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        return x * (1 + self.calls / 100).to(x.dtype) + self.mean.to(x.dtype)


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.memory = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, memory: dict[str, Any]) -> dict[str, Any]:
        return {"x": self.own(x) + self.memory(memory["states"][0]), "memory": memory}


class Cross(nn.Module):
    """All decoder blocks read the encoder's output, handed over in nested keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        for block in self.encoder:
            x = block(x)
        memory = {"states": (x, None)}
        for block in self.decoder:
            y = block(y, memory=memory)["x"]
        return {"loss": y.float().square().mean() + x.float().mean(), "hidden": (x, y)}


class Handing(nn.Module):
    """Modules that return their own weight, and blocks that are given weights of others."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, WIDTH))

        def forward(self, count: int) -> tuple[Tensor, dict[str, Tensor]]:
            return self.weight[:count], {"all": self.weight}

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.gate = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor, query: Tensor, *, others: list[Tensor]) -> tuple[Tensor, Tensor]:
            x = self.block(x * self.gate + query) * others[0] * others[1].mean(0)
            return x + query.sin(), self.gate  # the bits of a sum of gradients depend on which of them are added first

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.Positions()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        some, others = self.positions(x.shape[1])
        x, gate, query = x + some + others["all"][-1], self.query, self.query[None]
        for layer in self.layers:
            x, gate = layer(x, query, others=[gate, self.table.weight])
        return x * gate


class StatefulBlock(Block):
    """Computes with buffers that it updates: in place, and by taking a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.5 * self.mean + x.detach().float().mean(0)
        return super().forward((x * (1 + self.calls / 10) - self.mean).to(x.dtype))


class Inplace(nn.Module):
    """Blocks that write into what they are given and return views of it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            y[:, ::2].mul_(0.5)
            y.relu_()
            return y.transpose(0, 1), y[0]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        sums = []
        for layer in self.layers:
            y, first = layer(x)
            x = x + y.transpose(0, 1)
            sums.append(first)
        return x, torch.stack(sums)


def tokens(count: int = 2) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(32, (2, 12), generator=generator),) for _ in range(count)]


def floats(*shapes: tuple[int, ...], count: int = 2) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(count)]


def tuple_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, sums = model(*batch)
    return x.float().square().mean() + sums.float().std()


def dict_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(*batch)["loss"]
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], list[Batch], Callable[[nn.Module, Batch], Tensor]]] = {
    "stack": (Stack, tokens(), default_loss),
    "tied": (lambda: Stack(tied=True), tokens(), default_loss),
    "one block": (lambda: Stack(blocks=1), tokens(), default_loss),
    "several lists": (SeveralLists, floats((4, WIDTH)), default_loss),
    "torch encoder": (TorchEncoder, floats((2, 5, WIDTH)), default_loss),
    "no blocks": (NoBlocks, floats((2, 5, WIDTH)), default_loss),
    "weights laid anew": (Relaid, floats((2, 5, WIDTH)), default_loss),
    "batch norm": (ConvStack, floats((3, 3, 6, 6)), default_loss),
    "adapters": (adapted, tokens(), default_loss),
    "mixture": (Mixture, floats((5, WIDTH)), default_loss),
    "functional use": (Functional, tokens(), default_loss),
    "unused": (Unused, tokens(), default_loss),
    "called twice": (Twice, tokens(), default_loss),
    "integers and buffers": (Counting, tokens(), default_loss),
    "nested arguments": (Cross, floats((2, 5, WIDTH), (2, 5, WIDTH)), dict_loss),
    "weights handed on": (Handing, floats((2, 5, WIDTH)), default_loss),
    "stateful blocks": (lambda: nn.Sequential(*(StatefulBlock() for _ in range(4))), floats((4, WIDTH)), default_loss),
    "views and in-place": (Inplace, floats((4, 6, WIDTH)), tuple_loss),
}


DTYPES = torch.float32, torch.bfloat16


@pytest.mark.parametrize("name", MODELS)
def test_structures(name: str, device: torch.device) -> None:
    """Every structure meets every plan, in the one type or in the other."""
    build, batches, loss = MODELS[name]

    def make() -> nn.Module:
        with seeded():
            return build()

    dtype = DTYPES[list(MODELS).index(name) % 2]
    if name == "batch norm":  # which takes no bf16 weights beside fp32 statistics
        dtype = torch.float32
    check_equal_to_plain(make, batches, device=device, dtype=dtype, loop=Loop(max_norm=0.5, loss=loss))


def test_some_experts_get_no_gradient() -> None:
    with seeded():
        model = Mixture()
    default_loss(model, floats((5, WIDTH), count=1)[0]).backward()
    assert {parameter.grad is None for parameter in model.parameters()} == {True, False}
