"""Walks over trees agree with torch.utils._pytree, and go into dataclasses and objects that move themselves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from protrain.common.trees import map_leaves, tensors_in

Pair = namedtuple("Pair", "left right")


def tensors(count: int) -> list[Tensor]:
    return [torch.full((), float(index)) for index in range(count)]


def output() -> Any:
    """The output of a model of transformers: a class of its own, which its library has registered."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    a, b, c = tensors(3)
    return outputs.CausalLMOutput(loss=a, logits=b, hidden_states=(c, None))


TREES = {
    "a tensor": lambda: tensors(1)[0],
    "a parameter": lambda: nn.Parameter(tensors(1)[0]),
    "none": lambda: None,
    "arguments": lambda: ((tensors(2), 1, 2.0, "sum", None, torch.float32), {"b": tensors(1), "a": tensors(1)[0]}),
    "one twice": lambda: [tensors(1)[0]] * 2,
    "sizes": lambda: (torch.Size((1, 2)), torch.device("cpu"), torch.strided, slice(None), tensors(1)[0]),
    "other collections": lambda: OrderedDict(z=Pair(*tensors(2)), a=(tensors(1)[0], {tensors(1)[0]})),
    "a model's output": output,
}


@pytest.mark.parametrize("name", TREES)
def test_walks_are_those_of_torch(name: str) -> None:
    tree = TREES[name]()
    expected = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    assert list(map(id, tensors_in(tree))) == list(map(id, expected))
    expected_leaves, found_leaves = list[Any](), list[Any]()

    def note(leaves: list[Any], leaf: Any) -> int:
        leaves.append(leaf)
        return len(leaves)

    mapped, found = tree_map(partial(note, expected_leaves), tree), map_leaves(partial(note, found_leaves), tree)
    assert list(map(id, found_leaves)) == list(map(id, expected_leaves))
    assert type(found) is type(mapped)
    assert repr(found) == repr(mapped)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    left: Any
    right: Any = None
    made: int = dataclasses.field(init=False, default=1)


class Graphs:
    """A batch of a library for graphs: it moves itself."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right, self.text = left, right, "text"

    def to(self, device: Any) -> Any:
        raise NotImplementedError


OBJECTS = {
    "frozen": Frozen,
    "frozen inside": lambda left, right: Frozen(Frozen(left), [Frozen(right)]),
    "moves itself": Graphs,
    "moves itself inside": lambda left, right: Graphs(Frozen(left), [right]),
    "in collections": lambda left, right: OrderedDict(a=Pair(left, Frozen(right))),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_looked_into_and_copied(name: str) -> None:
    left, right = tensors(2)
    tree = ({"object": OBJECTS[name](left, right)}, "text")
    before = repr(tree)
    assert {id(tensor) for tensor in tensors_in(tree)} == {id(left), id(right)}
    mapped = map_leaves(lambda leaf: leaf + 5 if isinstance(leaf, Tensor) else leaf, tree)
    assert sorted(float(tensor) for tensor in tensors_in(mapped)) == [5, 6]
    assert {id(tensor) for tensor in tensors_in(tree)} == {id(left), id(right)}, "the original is as it was"
    assert repr(tree) == before
    assert type(mapped[0]["object"]) is type(tree[0]["object"])
