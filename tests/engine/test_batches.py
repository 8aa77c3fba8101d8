"""Batches of every kind: objects, dictionaries that forward writes into, and tensors that it changes in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import protrain
from protrain.common.errors import MisuseError
from tests.engine import residual
from tests.engine.harness import FEW_PLANS, Batch, Loop, Spec, adamw, check_equal_to_plain, seeded, wrap_under

SPECS = (Spec("none", "least", "c", small=True, speculate=True), Spec("some", "least", "isin"))
WIDTH = 24
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])


@dataclass(frozen=True, slots=True)
class Frozen:
    """Cannot be changed, and has a field that its constructor does not take."""

    x: Tensor
    edges: Tensor
    kind: str = field(init=False, default="ring")


@dataclass
class Store:
    x: Tensor
    edges: Tensor


class Stored:
    """Keeps its tensors in another object, and moves itself, as batches of graphs do."""

    def __init__(self, x: Tensor, edges: Tensor) -> None:
        self.store = Store(x, edges)

    x = property(lambda self: self.store.x, lambda self, x: setattr(self.store, "x", x))
    edges = property(lambda self: self.store.edges)

    def to(self, device: Any) -> Stored:
        """In place."""
        self.store.x, self.store.edges = self.x.to(device), self.edges.to(device)
        return self


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {"frozen": Frozen, "stored": Stored}


class Layer(residual.Block):
    """A layer of a graph that returns an object, if it can the one that it was given."""

    def forward(self, graph: Any) -> Any:
        sums = torch.zeros_like(graph.x).index_add(0, graph.edges[1], graph.x[graph.edges[0]])
        x = super().forward(graph.x + sums)
        if isinstance(graph, Frozen):
            return replace(graph, x=x)
        graph.x = x
        return graph


class Network(residual.Model):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, Layer)

    def forward(self, graph: Any) -> Tensor:
        graph = type(graph)(self.enter(graph.x), graph.edges)
        for layer in self.blocks:
            graph = layer(graph)
        return self.leave(graph.x)


def graphs(kind: str, count: int, nodes: int = 6) -> list[Batch]:
    return [(KINDS[kind](x, EDGES),) for (x,) in residual.batches(count, (nodes, 8))]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_train_as_in_the_plain_loop(kind: str) -> None:
    check_equal_to_plain(Network, graphs(kind, 2), specs=SPECS)


@pytest.mark.parametrize(("kind", "name"), [("frozen", r"graph\.x"), ("stored", r"graph\.store\.x")])
def test_objects_that_are_larger_than_planned_are_refused(kind: str, name: str) -> None:
    """With no byte to spare, so no tensor in an object escapes what the plan counts."""
    model, data = Network(), graphs(kind, 2)
    spec = Spec("none", "least", "c")
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], tight=True)
    Loop().run(wrapped, optimizer, data)
    with pytest.raises(MisuseError, match=rf"{name} has shape \(7, 8\), larger than the \(6, 8\)"):
        wrapped(*graphs(kind, 1, nodes=7)[0])


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
    generator, lengths = torch.Generator().manual_seed(0), torch.tensor([5, 3, 1])
    rows = [torch.randn(3, 5, 8, generator=generator) for _ in range(2)]
    data = [(pack_padded_sequence(each, lengths, batch_first=True),) for each in rows]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(batch[0].to(device))
        return found

    check_equal_to_plain(Recurrent, data, device=device, run=Loop(loss=loss).run, specs=SPECS)


# -- what forward writes into ------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Writes into its dictionary and takes from there what somebody has computed before, as sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(residual.Block(WIDTH) for _ in range(3))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        if "embedded" not in features:
            features["embedded"] = self.embedding(features["ids"])
        hidden = features["embedded"]
        for layer in self.layers:
            hidden = layer(hidden)
        features["sentence"] = hidden.mean(1)
        return features


def sentences(seed: int) -> Batch:
    return ({"ids": torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))},)


def test_features_that_are_written_and_read_train_as_in_the_plain_loop(device: torch.device) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(dict(batch[0]))["sentence"].square().mean()
        return found

    data = [sentences(seed) for seed in range(2)]
    check_equal_to_plain(Encoder, data, device=device, run=Loop(loss=loss).run, specs=FEW_PLANS[:2])


def test_the_callers_dictionary_has_what_the_model_wrote() -> None:
    """And the one that was the example has not: the model ran on it several times before the training began."""
    example, features = sentences(0), sentences(1)
    model = Encoder()
    with seeded(1):
        expected = model.train()(dict(features[0]))
    wrapped, _ = wrap_under(FEW_PLANS[0], model, adamw(model), example)
    assert example[0].keys() == {"ids"}
    with seeded(1):
        returned = wrapped(features[0])
    assert features[0].keys() == expected.keys()
    for name, value in expected.items():
        assert features[0][name] is returned[name]
        assert torch.equal(returned[name], value)


class Shifted(residual.Model):
    """Changes its input in place, unless that is differentiated."""

    def __init__(self) -> None:
        super().__init__(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 1 if x.requires_grad else x).add_(1))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_example_batch_keeps_its_values(requires_grad: bool) -> None:
    model, (data,) = Shifted(), residual.batches(1)[0]
    example = torch.cat([data, data])[: len(data)].requires_grad_(requires_grad)  # in the memory of a larger one
    protrain.wrap(model, adamw(model), example_batch=(example,), device="cpu", progress=False)
    assert torch.equal(example, data)
    assert example.grad is None


def test_inputs_changed_in_place_train_as_in_the_plain_loop(device: torch.device) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].clone().to(device)
        loss: Tensor = model(x).square().mean()
        assert torch.equal(x, batch[0].to(device) + 1), "the caller sees the change"
        return loss

    data, loop = residual.batches(2), Loop(loss=loss)
    check_equal_to_plain(Shifted, data, device=device, run=loop.run, specs=FEW_PLANS[2:])
