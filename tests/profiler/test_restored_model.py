"""A profile leaves a model as it was, whatever its forward does, so the next forward is the first one again."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.profiler.test_trace import _Block


class _Recent(OrderedDict[str, int]):
    """A list that counts what it has been given."""

    given = 0

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        self.given += 1


class _Restless(nn.Module):
    """Its first forward makes, replaces and drops modules, parameters and buffers.

    Every forward counts, changes containers of all kinds, and draws from the model's own generators and from numpy's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(3))
        self.act: nn.Module = nn.ReLU()
        self.rope: nn.Module | None = None
        self.extra, self.late = nn.ModuleList(), nn.Dropout(0.1)
        self.calls = 0
        self.order = OrderedDict(a=1, b=2)
        self.table = {"a": 1, "b": 2}
        self.counts, self.lists = Counter("ab"), defaultdict[str, list[int]](list)
        self.nested: dict[str, list[Any]] = {"a": [[]], "b": [set()]}
        self.last, self.recent = deque([1, 2], maxlen=2), _Recent(a=1)
        self.python, self.numpy, self.old = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
        self.bits, self.system = np.random.PCG64(0), random.SystemRandom()
        self.several = {"torch": [torch.Generator()]}

    def forward(self, x: Tensor) -> Tensor:
        assert self.training
        if self.rope is None:
            self.rope = nn.BatchNorm1d(8, affine=False, device=x.device)
            self.scale = nn.Parameter(torch.ones(8, device=x.device))
            self.register_buffer("average", torch.ones(8, device=x.device))
            self.act = nn.GELU()
            self.extra.append(nn.Dropout())
            del self.late
        self.calls += 1
        self.order.move_to_end("a")
        self.table["a"] = self.table.pop("a")
        self.counts["a"] += 1
        self.lists["new"].append(1)
        self.nested["a"][0].append(1)
        self.nested["a"].append(2)
        self.nested["b"][0].add(1)
        self.last.append(3)
        self.recent[str(len(self.recent))] = 1
        x = self.rope(x * self.scale) * sum(self.draw()) * self.system.random() * float(np.random.rand())
        for layer in self.layers if self.calls % 2 else reversed(self.layers):
            x = self.act(layer(x))
        return x

    def draw(self) -> list[float]:
        drawn = torch.rand((), generator=self.several["torch"][0])
        bits = self.bits.random_raw() / 2**64
        found: list[Any] = [self.python.random(), self.numpy.random(), self.old.rand(), bits, drawn]
        return [float(value) for value in found]

    def remembered(self) -> str:
        """What the containers hold, in order."""
        tables = [list(table.items()) for table in (self.order, self.table, self.counts, self.lists, self.recent)]
        return f"{tables} {self.nested} {self.last} {self.recent.given}"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_forward_makes_changes_and_draws_is_left_for_the_first_one(device: str) -> None:
    model, batch = _Restless().eval(), (torch.randn(4, 8),)
    modules, attributes = dict(model.named_modules()), [vars(module).copy() for module in model.modules()]
    state, remembered, of_numpy = list(model.state_dict()), model.remembered(), str(np.random.get_state(legacy=False))
    traced = protrain.profile(model, batch, device=device, dtype=torch.float32)
    assert [unit.name for unit in traced.units if unit.block is not None] == ["layers.0", "layers.1", "layers.2"]
    assert dict(model.named_modules()) == modules
    assert [vars(module) for module in model.modules()] == attributes
    assert list(model.state_dict()) == state
    assert model.remembered() == remembered
    assert str(np.random.get_state(legacy=False)) == of_numpy
    assert model.draw() == _Restless().draw()
    assert model.train()(*batch).device.type == "cpu"


def test_a_recurrent_module_keeps_its_own_lists_of_weights() -> None:
    recurrent = nn.GRU(8, 8, batch_first=True)
    protrain.profile(nn.Sequential(nn.Linear(8, 8), recurrent), (torch.randn(2, 3, 8),), device="cpu")
    assert not recurrent._weights_have_changed()
    assert all(kept is used for kept, used in zip(recurrent._flat_weights, recurrent.parameters(), strict=True))
