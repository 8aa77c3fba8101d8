"""The tensors in nested arguments and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in ``tree``, in the order of ``torch.utils._pytree``.

    It goes through every operation of a profile and every call of a module: what these nearly always are is told apart
    here, in a fraction of the time that the general walk takes.
    """
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
