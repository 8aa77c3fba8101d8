"""Key/value caches of transformers among the inputs of a block: a second run must not add to what the first has added.

A cache is an object that all blocks share and to which each of them adds. It usually replaces its tensors and does not
write into them. So a copy of the object and its parts, without copies of its tensors, is the cache as it was.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import Tensor

_MODULE = "transformers.cache_utils"


def is_cache(leaf: Any) -> bool:
    """Whether ``leaf`` is a key/value cache of transformers."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(leaf, getattr(module, "Cache", ()))


def copied(cache: Any) -> Any:
    """A copy of ``cache`` that has layers of its own and shares the tensors."""
    return _copied(cache, {})


def tensors_of(cache: Any) -> list[Tensor]:
    """Every tensor in ``cache``."""
    found: dict[int, Any] = {}
    _copied(cache, found)
    return [value for value in found.values() if isinstance(value, Tensor)]


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    """A copy of ``value``, or itself if a cache cannot change it. ``seen`` has the result for every id so far."""
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
    elif any(kind.__module__ == _MODULE for kind in type(value).__mro__):  # a cache, a layer, or a part of that
        result = seen[id(value)] = copy.copy(value)
        vars(result).update({name: _copied(item, seen) for name, item in vars(value).items()})
    return result
