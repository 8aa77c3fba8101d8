"""Finds and replaces the tensors in nested arguments and outputs.

A tree consists of

- tuples, lists and dictionaries,
- types that a library has registered with ``torch.utils._pytree``, and named tuples,
- dataclasses, classes of attrs, and subclasses of ``dict`` and ``list``,
- objects with a method ``to``, such as batches of graphs or images,
- other objects with a tensor among their attributes, alone or in a tuple, list or dictionary.

Everything else is a leaf, modules included. An object that occurs twice is walked once, and an object may refer to
itself.

These walks are taken several times in every call of a block and for every operation of a profile, while the device may
have nothing else to do. So the types that arguments nearly always consist of are handled here first, much faster than
by the general walk.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from types import MemberDescriptorType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_WITHOUT_TENSORS = _PLAIN | {torch.Size}
_CONTAINERS = (tuple, list, dict)
_Seen = dict[int, tuple[Any, Any]]  # from an object's id to the object and the copy that replaces it
# the function, the objects mapped so far, and which objects count as leaves
_Walk = tuple[Callable[[Any], Any], _Seen, Callable[[Any], bool]]


class Leaf:
    """A placeholder for a leaf in a tree that is kept. No walk looks into its attributes."""

    __slots__ = ()


class _Kind(Enum):
    """How the instances of a type are walked."""

    LEAF = auto()
    NODE = auto()  # by torch.utils._pytree
    RECORD = auto()  # by its attributes, and by its contents if it is a dictionary or list
    OBJECT = auto()  # as a record if a tensor is among its attributes; otherwise it is a leaf


_kinds: WeakKeyDictionary[type, _Kind] = WeakKeyDictionary()


def _never(_: Any) -> bool:
    return False


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in ``tree``, in the order of its parts."""
    found: list[Tensor] = []
    _collect(tree, found, {})
    return found


def _collect(tree: Any, found: list[Tensor], seen: _Seen) -> None:
    kind = type(tree)  # the type is compared first, because isinstance is slow for what is no tensor
    if kind is Tensor:
        found.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _collect(part, found, seen)
    elif kind is dict:
        for part in tree.values():
            _collect(part, found, seen)
    elif kind in _WITHOUT_TENSORS:
        return
    elif isinstance(tree, Tensor):
        found.append(tree)
    elif id(tree) not in seen:
        parts = _parts(tree)
        if parts:
            seen[id(tree)] = tree, tree
            for part in parts:
                _collect(part, found, seen)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of ``tree`` with each leaf replaced by ``function`` of it. Containers and objects in it are new.

    Objects are copied with ``copy.copy``, so no constructor runs.

    Raises:
        ValueError: an object that holds tensors cannot be copied.
    """
    return _map((function, {}, _never), tree)


def replace_leaves(function: Callable[[Any], Any], tree: Any, *, whole: Callable[[Any], bool] = _never) -> Any:
    """``tree`` itself if ``function`` returns every leaf unchanged; otherwise what ``map_leaves`` returns.

    Others may change the containers of ``tree`` later, and whoever has ``tree`` should see that. So it is copied only
    if it must be. An object for which ``whole`` is true is a leaf.
    """
    same = True

    def noted(leaf: Any) -> Any:
        nonlocal same
        new = function(leaf)
        same = same and new is leaf
        return new

    mapped = _map((noted, {}, whole), tree)
    return tree if same else mapped


def _map(walk: _Walk, tree: Any) -> Any:
    kind = type(tree)
    if kind is Tensor or kind in _PLAIN:
        return walk[0](tree)
    if kind is tuple:
        return tuple([_map(walk, part) for part in tree])
    if kind is list:
        return [_map(walk, part) for part in tree]
    if kind is dict:
        return {key: _map(walk, part) for key, part in tree.items()}
    return walk[0](tree) if isinstance(tree, Tensor) else _map_other(walk, tree)


def _map_other(walk: _Walk, tree: Any) -> Any:
    function, seen, whole = walk
    if id(tree) in seen:
        return seen[id(tree)][1]
    how = _kind_of(tree)
    if whole(tree) or not _is_walked(tree, how):
        return function(tree)
    if how is _Kind.NODE:
        parts, spec = _flattened(tree)
        new = tree_unflatten([_map(walk, part) for part in parts], spec)
        seen[id(tree)] = tree, new
        return new
    new = _copied(tree)
    seen[id(tree)] = tree, new  # noted before its parts are walked, because they may refer to it
    # The attributes of the copy are walked, because ``__copy__`` may have copied more than the object alone.
    for name, part in _attributes(new).items():
        _set_attribute(new, name, _map(walk, part))
    if isinstance(new, list):
        list.__setitem__(new, slice(None), [_map(walk, part) for part in list.__iter__(new)])
    elif isinstance(new, dict):
        for key, part in list(dict.items(new)):
            dict.__setitem__(new, key, _map(walk, part))
    return new


def named_tensors(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``tree`` with its dotted name.

    Elements of a mapping are named by their keys, attributes by their names, and all others by their positions.
    """
    yield from _named_tensors(tree, "", frozenset())


def _named_tensors(tree: Any, name: str, around: frozenset[int]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of ``tree``, which lies in the containers and objects whose ids are ``around``."""
    if isinstance(tree, Tensor):
        yield name, tree
        return
    if isinstance(tree, Mapping):
        children = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, tuple | list):
        children = [(str(index), value) for index, value in enumerate(tree)]
    elif _kind_of(tree) is _Kind.NODE:
        children = [(str(index), value) for index, value in enumerate(_parts(tree))]
    else:
        children = list(_attributes(tree).items()) if _is_walked(tree, _kind_of(tree)) else []
    around |= {id(tree)}
    for key, value in children:
        if id(value) not in around:
            yield from _named_tensors(value, f"{name}.{key}" if name else key, around)


def _parts(tree: Any) -> list[Any]:
    how = _kind_of(tree)
    if how is _Kind.NODE:
        return _flattened(tree)[0]
    if not _is_walked(tree, how):
        return []
    parts = [*_attributes(tree).values()]
    if isinstance(tree, list):
        parts += list.__iter__(tree)
    elif isinstance(tree, dict):
        parts += dict.values(tree)
    return parts


def knows_to(tree: Any) -> bool:
    """Whether ``tree`` is an object with a method ``to(device)``, which knows which of its parts move to a device.

    A packed sequence, for example, leaves its lengths in host memory. A method ``to`` that takes no device, such as one
    that converts a unit, does not count.
    """
    method = getattr(type(tree), "to", None)
    if isinstance(tree, Tensor | nn.Module | type) or not inspect.isfunction(method):
        return False
    parameters = inspect.signature(method).parameters.values()
    return any(parameter.name == "device" or parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def _kind_of(tree: Any) -> _Kind:
    kind = type(tree)
    found = _kinds.get(kind)
    if found is None:
        found = _kinds[kind] = _classified(tree, kind)
    return found


def _classified(tree: Any, kind: type) -> _Kind:
    if isinstance(tree, Leaf | Tensor | nn.Module | type | Enum):
        return _Kind.LEAF
    parts, _ = _flattened(tree)
    if not (len(parts) == 1 and parts[0] is tree):
        return _Kind.NODE
    if isinstance(tree, tuple) or not (kind.__dictoffset__ or _slots(kind) or isinstance(tree, list | dict)):
        return _Kind.LEAF
    known = dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or isinstance(tree, list | dict)
    return _Kind.RECORD if known or knows_to(tree) else _Kind.OBJECT


def _is_walked(tree: Any, how: _Kind) -> bool:
    if how is not _Kind.OBJECT:
        return how is not _Kind.LEAF
    return any(
        isinstance(value, Tensor) or (type(value) in _CONTAINERS and any(_holds_tensor(value)))
        for value in _attributes(tree).values()
    )


def _holds_tensor(container: Any) -> Iterator[bool]:
    return (isinstance(part, Tensor) for part in (container.values() if type(container) is dict else container))


def _flattened(tree: Any) -> tuple[list[Any], Any]:
    """The direct parts of ``tree`` in ``torch.utils._pytree``, and the spec that rebuilds it from other parts."""
    return tree_flatten(tree, is_leaf=lambda part: part is not tree)


def _attributes(tree: Any) -> dict[str, Any]:
    """The attributes in the dictionary and the slots of the object ``tree``."""
    own = getattr(tree, "__dict__", None)
    found = dict(own) if own is not None and own is not tree else {}
    for name, slot in _slots(type(tree)).items():
        try:
            found[name] = slot.__get__(tree)
        except AttributeError:  # the slot has no value
            continue
    return found


def _set_attribute(tree: Any, name: str, value: Any) -> None:
    """Set an attribute without ``__setattr__``, which frozen classes refuse and other classes may redefine."""
    slot = _slots(type(tree)).get(name)
    if slot is not None:
        slot.__set__(tree, value)
    else:
        vars(tree)[name] = value


def _slots(kind: type) -> dict[str, Any]:
    return {
        name: slot
        for cls in kind.__mro__
        if "__slots__" in vars(cls)
        for name, slot in vars(cls).items()
        if isinstance(slot, MemberDescriptorType)
    }


def _copied(tree: Any) -> Any:
    try:
        new = copy.copy(tree)
    except Exception as error:
        raise ValueError(
            f"a {type(tree).__name__} holds tensors but cannot be copied ({error}): give it a method __copy__, or pass "
            "its tensors in a tuple, a dict or a dataclass"
        ) from error
    if isinstance(tree, dict) and getattr(tree, "__dict__", None) is tree:  # its keys are also its attributes
        new.__dict__ = new
    return new
