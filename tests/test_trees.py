"""``tensors_in`` and ``map_leaves`` do what the general walks over a tree do, in their order."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from protrain.trees import map_leaves, tensors_in

Pair = namedtuple("Pair", "left right")


def tensors(count: int) -> list[Tensor]:
    return [torch.full((), float(index)) for index in range(count)]


def output() -> Any:
    """What a model of transformers returns: a class of its own, registered by its library."""
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
def test_tensors_are_those_of_the_general_walk(name: str) -> None:
    tree = TREES[name]()
    expected = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    found = tensors_in(tree)
    assert list(map(id, found)) == list(map(id, expected))
    assert bool(found) == (name != "none")


@pytest.mark.parametrize("name", TREES)
def test_leaves_are_mapped_as_by_the_general_walk(name: str) -> None:
    tree = TREES[name]()
    expected_leaves: list[Any] = []
    found_leaves: list[Any] = []

    def noted(leaves: list[Any]) -> Any:
        def note(leaf: Any) -> Any:
            leaves.append(leaf)
            return len(leaves)

        return note

    expected, found = tree_map(noted(expected_leaves), tree), map_leaves(noted(found_leaves), tree)
    assert list(map(id, found_leaves)) == list(map(id, expected_leaves))
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)


def test_mapped_containers_are_new() -> None:
    """A block's lists and dictionaries are kept as they were when it was called, whatever the model puts in later."""
    inner: list[Any] = [1]
    tree = ({"a": inner}, inner)
    mapped = map_leaves(lambda leaf: leaf, tree)
    inner.append(2)
    assert mapped == ({"a": [1]}, [1])
