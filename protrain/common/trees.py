"""Finds and replaces the tensors in nested arguments and outputs.

A tree consists of

- tuples, lists and dictionaries,
- types that a library has registered with ``torch.utils._pytree``, and named tuples,
- dataclasses,
- objects with a method ``to``, such as batches of graphs or images, whose attributes are looked at.

Everything else is a leaf, modules and all other objects included.

These walks are taken several times in every call of a block and for every operation of a profile, while the device may
have nothing else to do. So the types that arguments nearly always consist of are handled here first, much faster than
by the general walk.

[Note: key/value caches] A second run of a block must not add to what the first has added. A cache of transformers is an
object that all blocks share and to which each of them adds. It usually replaces its tensors and does not write into
them. So a copy of the object and its parts, without copies of its tensors, is the cache as it was.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_WITHOUT_TENSORS = _PLAIN | {torch.Size}
_CACHES = "transformers.cache_utils"  # the module of transformers with key/value caches


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in ``tree``, in the order of its parts."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    kind = type(tree)  # the type is compared first, because isinstance is slow for what is no tensor
    if kind is Tensor:
        found.append(tree)
    elif kind is tuple or kind is list or kind is dict:
        for part in tree.values() if kind is dict else tree:
            _collect(part, found)
    elif kind in _WITHOUT_TENSORS:
        return
    elif isinstance(tree, Tensor):
        found.append(tree)
    elif (node := _taken_apart(tree)) is not None:
        for part in node[0].values():
            _collect(part, found)


def map_leaves(function: Callable[[Any], Any], tree: Any, *, whole: Callable[[Any], bool] = lambda _: False) -> Any:
    """A copy of ``tree`` with each leaf replaced by ``function`` of it. Containers and objects in it are new.

    Objects are copied with ``copy.copy``, so no constructor runs. An object for which ``whole`` is true is a leaf.
    """
    kind = type(tree)
    if kind is Tensor or kind in _PLAIN:
        return function(tree)
    if kind is tuple or kind is list:
        return kind([map_leaves(function, part, whole=whole) for part in tree])
    if kind is dict:
        return {key: map_leaves(function, part, whole=whole) for key, part in tree.items()}
    node = None if isinstance(tree, Tensor) or whole(tree) else _taken_apart(tree)
    if node is None:
        return function(tree)
    parts, made_of = node
    return made_of([map_leaves(function, part, whole=whole) for part in parts.values()])


def replace_leaves(function: Callable[[Any], Any], tree: Any, *, whole: Callable[[Any], bool] = lambda _: False) -> Any:
    """``tree`` itself if ``function`` returns every leaf unchanged; otherwise what ``map_leaves`` returns.

    Others may change the containers of ``tree`` later, and whoever has ``tree`` should see that. So it is copied only
    if it must be.
    """
    same = True

    def noted(leaf: Any) -> Any:
        nonlocal same
        new = function(leaf)
        same = same and new is leaf
        return new

    mapped = map_leaves(noted, tree, whole=whole)
    return tree if same else mapped


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``tree`` with its dotted name, behind the ``name`` of the tree.

    Elements of a mapping are named by their keys, attributes by their names, and all others by their positions.
    """
    if isinstance(tree, Tensor):
        yield name, tree
        return
    node = None if isinstance(tree, Mapping) else _taken_apart(tree)
    parts = tree if isinstance(tree, Mapping) else {} if node is None else node[0]
    for key, value in parts.items():
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))


def knows_to(tree: Any) -> bool:
    """Whether ``tree`` is an object with a method ``to(device)``, which knows which of its parts move to a device.

    A packed sequence, for example, leaves its lengths in host memory. A method ``to`` that takes no device, such as one
    that converts a unit, does not count.
    """
    kind: Any = type(tree)
    return not isinstance(tree, Tensor | nn.Module | type) and _takes_device(kind)


@cache
def _takes_device(kind: Any) -> bool:
    method = getattr(kind, "to", None)
    parameters = inspect.signature(method).parameters.values() if inspect.isfunction(method) else ()
    return any(parameter.name == "device" or parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def _taken_apart(tree: Any) -> tuple[dict[str, Any], Callable[[list[Any]], Any]] | None:
    """The parts of ``tree`` by name, and what makes such a tree of other parts. None: it is a leaf."""
    if isinstance(tree, nn.Module | type | Enum):
        return None
    if (registered := SUPPORTED_NODES.get(_get_node_type(tree))) is not None:
        parts, context = registered.flatten_fn(tree)
        return {str(index): part for index, part in enumerate(parts)}, lambda new: registered.unflatten_fn(new, context)
    if dataclasses.is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree)]
    elif knows_to(tree):
        names = list(getattr(tree, "__dict__", ()))
    else:
        return None
    named = {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    return named, lambda new: _with_attributes(tree, dict(zip(named, new, strict=True)))


def _with_attributes(tree: Any, attributes: dict[str, Any]) -> Any:
    """A copy of ``tree`` with other attributes."""
    new = copy.copy(tree)
    for name, value in attributes.items():
        object.__setattr__(new, name, value)  # which a frozen class does not refuse
    return new


def is_cache(leaf: Any) -> bool:
    """Whether ``leaf`` is a key/value cache of transformers."""
    module = sys.modules.get(_CACHES)
    return module is not None and isinstance(leaf, getattr(module, "Cache", ()))


def copied_cache(cache: Any, tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """A copy of ``cache`` that has layers of its own, with ``tensor`` of each tensor: by default the same tensors."""
    return _copied(cache, {}, tensor)


def tensors_of_cache(cache: Any) -> list[Tensor]:
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
    elif any(kind.__module__ == _CACHES for kind in type(value).__mro__):  # a cache, or a part of one
        result = seen[id(value)] = copy.copy(value)
        vars(result).update({name: _copied(item, seen, tensor) for name, item in vars(value).items()})
    return result
