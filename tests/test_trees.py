"""Walks over trees agree with torch.utils._pytree."""

from __future__ import annotations

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
