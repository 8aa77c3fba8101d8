"""``tensors_in`` finds what the general walk over a tree finds, in its order."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from protrain.trees import tensors_in

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
