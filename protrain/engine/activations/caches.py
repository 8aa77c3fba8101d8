"""Key/value caches of transformers among what a block is given: run again, it adds to what its first run was given.

A cache is an object that all blocks share and that each adds to. As a rule it replaces tensors and keeps their values,
so a copy of the object and what it consists of, without its tensors, is the cache as it was.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import Tensor

_MODULE = "transformers.cache_utils"


def is_cache(leaf: Any) -> bool:
    """Whether ``leaf`` is a cache of transformers."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(leaf, getattr(module, "Cache", ()))


def copied(cache: Any) -> Any:
    """``cache`` with layers of its own, and the same tensors."""
    return _copied(cache, {})


def tensors_of(cache: Any) -> list[Tensor]:
    """Every tensor in ``cache``."""
    found: dict[int, Any] = {}
    _copied(cache, found)
    return [value for value in found.values() if isinstance(value, Tensor)]


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    """A copy of ``value`` where a cache may change it; ``seen`` gets all that was met, or its copy, by id."""
    if id(value) in seen:
        return seen[id(value)]
    result = seen[id(value)] = value
    if isinstance(value, list):
        result = seen[id(value)] = []
        result += [_copied(item, seen) for item in value]
    elif isinstance(value, tuple):
        result = seen[id(value)] = tuple(_copied(item, seen) for item in value)
    elif isinstance(value, dict):
        result = seen[id(value)] = copy.copy(value)
        result.update({key: _copied(item, seen) for key, item in value.items()})
    elif any(kind.__module__ == _MODULE for kind in type(value).__mro__):  # a cache, a layer of it, or a part of that
        result = seen[id(value)] = copy.copy(value)
        vars(result).update({name: _copied(item, seen) for name, item in vars(value).items()})
    return result
