"""The tensors in nested arguments and outputs.

These walks are taken several times in every call of a block and for every operation of a profile, while the device may
have nothing else to do. What arguments nearly always consist of is told apart here, in a fraction of the time that the
general walk takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in ``tree``, in the order of ``torch.utils._pytree``."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
        return
    kind = type(tree)
    if kind is tuple or kind is list:
        for part in tree:
            _collect(part, found)
    elif kind is dict:
        for part in tree.values():
            _collect(part, found)
    elif kind not in _PLAIN:  # a leaf, or of a type that its library has registered
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` of every leaf in its place, as ``torch.utils._pytree`` has it."""
    kind = type(tree)
    if kind is tuple:
        return tuple([map_leaves(function, part) for part in tree])
    if kind is list:
        return [map_leaves(function, part) for part in tree]
    if kind is dict:
        return {key: map_leaves(function, part) for key, part in tree.items()}
    if isinstance(tree, Tensor) or kind in _PLAIN:
        return function(tree)
    return tree_map(function, tree)
