"""A profile leaves a model as it was, whatever its forward does, so the next forward is the first one again."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.profiler.test_trace import _Block

profile = partial(protrain.profile, device="cpu")


class _Lazy(nn.Module):
    """A module that creates what it needs in its first forward, counts, and draws random numbers in its own ways."""

    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(16) for _ in range(3))
        self.generator = torch.Generator()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.register_buffer("average", torch.ones(16))
            self.table = torch.ones(16)
            self.ready = True
        self.calls += 1
        assert self.training
        for layer in self.layers if self.calls % 2 else reversed(self.layers):
            x = layer(x) * self.table
        return x + torch.rand(16, generator=self.generator) * float(np.random.rand())


def test_what_a_forward_makes_is_left_for_the_first_one() -> None:
    model = _Lazy().eval()
    attributes = [vars(module).copy() for module in model.modules()]
    state, numpy_state = model.generator.get_state(), str(np.random.get_state(legacy=False))
    traced = profile(model, (torch.randn(4, 16),))
    assert [unit.name for unit in traced.units if unit.block is not None] == ["layers.0", "layers.1", "layers.2"]
    assert [vars(module) for module in model.modules()] == attributes
    assert not model._buffers
    assert model.generator.get_state().equal(state)
    assert str(np.random.get_state(legacy=False)) == numpy_state


def test_a_recurrent_module_keeps_its_own_lists_of_weights() -> None:
    recurrent = nn.GRU(8, 8, batch_first=True)
    profile(nn.Sequential(nn.Linear(8, 8), recurrent), (torch.randn(2, 3, 8),))
    assert not recurrent._weights_have_changed()
    assert all(kept is used for kept, used in zip(recurrent._flat_weights, recurrent.parameters(), strict=True))


class _Changing(nn.Module):
    """A module that creates, replaces and drops modules and parameters in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.act: nn.Module = nn.ReLU()
        self.rope: nn.Module | None = None
        self.extra = nn.ModuleList()
        self.late = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.rope is None:
            self.rope = nn.BatchNorm1d(8, affine=False, device=x.device)
            self.scale = nn.Parameter(torch.ones(8, device=x.device))
            self.act = nn.GELU()
            self.extra.append(nn.Dropout())
            del self.late
        x = self.rope(x * self.scale)
        for layer in self.layers:
            x = self.act(layer(x))
        return x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_and_parameters_that_a_forward_makes_are_left_for_the_first_one(device: str) -> None:
    model = _Changing()
    modules, state, batch = dict(model.named_modules()), list(model.state_dict()), (torch.randn(4, 8),)
    profile(model, batch, device=device, dtype=torch.float32)
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == state
    assert model(*batch).device.type == "cpu"


class _Recent(OrderedDict[str, int]):
    """A list that counts what it has been given."""

    given = 0

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        self.given += 1


class _Remembering(nn.Module):
    """A module that keeps all sorts of things from one forward to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.order = OrderedDict(a=1, b=2)
        self.table = {"a": 1, "b": 2}
        self.counts, self.lists = Counter("ab"), defaultdict[str, list[int]](list)
        self.nested: dict[str, list[Any]] = {"a": [[]], "b": [set()]}
        self.last, self.recent = deque([1, 2], maxlen=2), _Recent(a=1)

    def forward(self, x: Tensor) -> Tensor:
        self.order.move_to_end("a")
        self.table["a"] = self.table.pop("a")
        self.counts["a"] += 1
        self.lists["new"].append(1)
        self.nested["a"][0].append(1)
        self.nested["a"].append(2)
        self.nested["b"][0].add(1)
        self.last.append(3)
        self.recent[str(len(self.recent))] = 1
        for layer in self.layers:
            x = layer(x)
        return x

    def remembered(self) -> str:
        """Everything that the module keeps, in order."""
        tables = [list(table.items()) for table in (self.order, self.table, self.counts, self.lists, self.recent)]
        return f"{tables} {self.nested} {self.last} {self.recent.given}"


def test_containers_hold_what_they_did_in_the_same_order() -> None:
    model = _Remembering()
    before = model.remembered()
    profile(model, (torch.randn(4, 8),))
    assert model.remembered() == before


class _Drawing(nn.Module):
    """A module with random number generators of its own, some of them in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.python, self.numpy, self.old = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
        self.bits, self.system = np.random.PCG64(0), random.SystemRandom()
        self.several = {"torch": [torch.Generator()]}

    def forward(self, x: Tensor) -> Tensor:
        x = x * sum(self.draw()) * self.system.random()
        for layer in self.layers:
            x = layer(x)
        return x

    def draw(self) -> list[float]:
        drawn = torch.rand((), generator=self.several["torch"][0])
        found: list[Any] = [
            self.python.random(),
            self.numpy.random(),
            self.old.rand(),
            self.bits.random_raw() / 2**64,
            drawn,
        ]
        return [float(value) for value in found]


def test_a_models_own_random_numbers_are_those_that_came_next() -> None:
    model, other = _Drawing(), _Drawing()
    profile(model, (torch.randn(4, 8),))
    assert model.draw() == other.draw()
