"""Key/value caches of transformers: a second run must not add to what the first has added.

A cache is an object that all blocks share and to which each of them adds. It usually replaces its tensors and does not
write into them. So a copy of the object and its parts, without copies of its tensors, is the cache as it was.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

_MODULE = "transformers.cache_utils"


def is_cache(leaf: Any) -> bool:
    """Whether ``leaf`` is a key/value cache of transformers."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(leaf, getattr(module, "Cache", ()))


def is_part(value: Any) -> bool:
    """Whether ``value`` is a key/value cache, one of its layers, or a part of these that has attributes."""
    return any(kind.__module__ == _MODULE for kind in type(value).__mro__)


def copied(cache: Any, tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """A copy of ``cache`` that has layers of its own, with ``tensor`` of each tensor: by default the same tensors."""
    return _copied(cache, {}, tensor)


def tensors_of(cache: Any) -> list[Tensor]:
    """Every tensor in ``cache``."""
    found: dict[int, Any] = {}
    _copied(cache, found, lambda tensor: tensor)
    return [value for value in found.values() if isinstance(value, Tensor)]


def _copied(value: Any, seen: dict[int, Any], tensor: Callable[[Tensor], Tensor]) -> Any:
    """A copy of ``value``, or itself if a cache cannot change it. ``seen`` has the result for every id so far."""
    if id(value) in seen:
        return seen[id(value)]
    result = seen[id(value)] = value
    if isinstance(value, Tensor):
        result = seen[id(value)] = tensor(value)
    elif isinstance(value, list):
        result = seen[id(value)] = []
        result += [_copied(item, seen, tensor) for item in value]
    elif isinstance(value, tuple):
        result = seen[id(value)] = tuple(_copied(item, seen, tensor) for item in value)
    elif isinstance(value, dict):
        result = seen[id(value)] = copy.copy(value)
        result.update({key: _copied(item, seen, tensor) for key, item in value.items()})
    elif is_part(value):
        result = seen[id(value)] = copy.copy(value)
        vars(result).update({name: _copied(item, seen, tensor) for name, item in vars(value).items()})
    return result
