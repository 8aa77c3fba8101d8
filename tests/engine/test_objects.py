"""Batches that are objects, objects between blocks, and blocks that change the object they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    NONE,
    SWAP,
    Batch,
    Loop,
    Spec,
    adamw,
    check_equal_to_plain,
    seeded,
    wrap_under,
)

SPECS = (
    Spec("none", "least", (CKPT,), small=True, speculate=True),
    Spec("some", "least", (CKPT_SWAP, SWAP, CKPT_SWAP, NONE)),
)
WIDTH = 24
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


@dataclass
class Graph:
    """As users write it."""

    x: Tensor
    edges: Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    """Cannot be changed, and has a field that its constructor does not take."""

    x: Tensor
    edges: Tensor
    kind: str = field(init=False, default="ring")


class Pair(NamedTuple):
    """A named tuple."""

    x: Tensor
    edges: Tensor


class Store:
    """What keeps the tensors of a batch of graphs."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.x, self.edges = x, edges

    def to(self, device: Any) -> Store:
        """In place."""
        self.x, self.edges = self.x.to(device), self.edges.to(device)
        return self


class Stored:
    """Keeps its tensors in another object, and moves itself, as batches of graphs do."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.store = Store(x, edges)

    x = property(lambda self: self.store.x, lambda self, x: setattr(self.store, "x", x))
    edges = property(lambda self: self.store.edges)

    def to(self, device: Any) -> Stored:
        """In place."""
        self.store.to(device)
        return self


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": Graph,
    "frozen": Frozen,
    "named tuple": Pair,
    "stored": Stored,
}


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.own, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, graph: Any) -> Any:
        sums = torch.zeros_like(graph.x).index_add(0, graph.edges[1], graph.x[graph.edges[0]])
        x = graph.x + self.drop(torch.tanh(self.own(graph.x) + self.others(sums)))
        if self.kind == "frozen":
            new = replace(graph, x=x)
            assert new.kind == graph.kind
            return new
        if self.kind == "named tuple":
            return graph._replace(x=x)
        graph.x = x  # in the object that it was given
        return graph


class Network(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(4))

    def forward(self, graph: Any) -> Tensor:
        graph = KINDS[self.kind](self.enter(graph.x), graph.edges)
        for layer in self.layers:
            graph = layer(graph)
        loss: Tensor = graph.x.square().mean()
        return loss


def network(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with seeded():
            return Network(kind)

    return make


def graphs(kind: str, count: int, nodes: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(KINDS[kind](torch.randn(nodes, 4, generator=generator), EDGES),) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_train_as_in_the_plain_loop(kind: str) -> None:
    check_equal_to_plain(network(kind), graphs(kind, 2), device=torch.device("cpu"), specs=SPECS)


def test_an_example_batch_may_be_the_one_argument() -> None:
    data, losses = graphs("dataclass", 3), []
    for example in (data[0], data[0][0]):
        model = network("dataclass")()
        model, optimizer = protrain.wrap(model, adamw(model), example_batch=example, device="cpu", progress=False)
        losses.append(Loop().run(model, optimizer, data))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tight_device_suffices(kind: str) -> None:
    """No tensor in an object escapes what the plan counts, and the simulated device is full."""
    model, data = network(kind)(), graphs(kind, 2)
    wrapped, optimizer = wrap_under(SPECS[0], model, adamw(model), data[0], device=torch.device("cpu"), tight=True)
    Loop().run(wrapped, optimizer, data)


@pytest.mark.parametrize(("kind", "name"), [("dataclass", r"graph\.x"), ("stored", r"graph\.store\.x")])
def test_larger_objects_than_planned_are_refused(kind: str, name: str) -> None:
    model, data = network(kind)(), graphs(kind, 1)
    spec = Spec("none", "least", (CKPT,))  # no batch needs less memory
    wrapped, _ = wrap_under(spec, model, adamw(model), data[0], device=torch.device("cpu"), tight=True)
    with pytest.raises(MisuseError, match=rf"{name} has shape \(7, 4\), larger than the \(6, 4\)"):
        wrapped(*graphs(kind, 1, nodes=7)[0])


class Growing(nn.Module):
    """Each block adds its features to those of the object, so a second run on the changed object would not fit."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, 4)

        def forward(self, graph: Graph) -> Graph:
            graph.x = torch.cat([graph.x, torch.tanh(self.linear(graph.x))], -1)
            return graph

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(self.Layer(WIDTH + 4 * index) for index in range(4))

    def forward(self, graph: Graph) -> Tensor:
        graph = Graph(self.enter(graph.x), graph.edges)
        for layer in self.layers:
            graph = layer(graph)
        loss: Tensor = graph.x.square().mean()
        return loss


def test_objects_that_grow_from_block_to_block() -> None:
    def make() -> nn.Module:
        with seeded():
            return Growing()

    check_equal_to_plain(make, graphs("dataclass", 2), device=torch.device("cpu"), specs=SPECS)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))

    def forward(self, packed: PackedSequence) -> Tensor:
        for layer in self.layers:
            packed, _ = layer(packed)
        hidden, _ = pad_packed_sequence(packed, batch_first=True)
        return F.mse_loss(hidden, torch.ones_like(hidden))


def test_packed_sequences_keep_their_lengths_on_the_host(device: torch.device) -> None:
    def make() -> nn.Module:
        with seeded():
            return Recurrent()

    generator = torch.Generator().manual_seed(0)
    data = [
        (pack_padded_sequence(torch.randn(3, 5, 8, generator=generator), torch.tensor([5, 3, 1]), batch_first=True),)
        for _ in range(2)
    ]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(batch[0].to(device))
        return found

    check_equal_to_plain(make, data, device=device, loop=Loop(loss=loss), specs=SPECS)
