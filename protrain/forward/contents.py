"""What modules consist of, kept by identity, so that they can be put back to how they were.

[Note: contents of modules] The contents of modules are their classes and attributes, and what these lead to: the
contents of lists, dictionaries and sets (a module's hooks, parameters, buffers and submodules lie in such), and the
attributes of other objects, such as configurations and tensors. Nothing is copied: a tensor is the same tensor,
whatever is written to it. Some things are not looked into: functions, with what they close over; objects of torch, of
threads and of queues, which others use meanwhile; objects with slots, and objects of C; what lies deeper than
``_DEPTH``, and in containers of ``_LONGEST`` entries and more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from protrain.forward.rng import GENERATORS

_LONGEST = 1000  # entries of a container, as a longer one is no setting, and would take long to compare
_DEPTH = 6  # of containers and objects in each other, from a module's attributes on
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, tuple)
_WHOLE = (nn.Module, type, ModuleType, FunctionType, partial, *GENERATORS)
_OPAQUE = {"torch", "protrain", "threading", "queue", "concurrent", "asyncio", "multiprocessing", "logging"}
_remembered: Any = lru_cache(4096)


@_remembered
def _kind(cls: Any) -> Any:
    """The builtin class whose methods read and write a container of ``cls``, as those of a subclass may do anything.

    It is ``object`` if only the attributes of an object matter, and None if nothing of it is looked into.
    """
    if issubclass(cls, Tensor):  # bitsandbytes moves tensors between attributes of a weight and of other objects
        return object
    if issubclass(cls, _WHOLE) or cls.__module__.partition(".")[0] in _OPAQUE:
        return None
    return next((kind for kind in _CONTAINERS if issubclass(cls, kind)), object if cls.__dictoffset__ else None)


def _read(container: Any, kind: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """The keys of the container, if it is a dictionary, and its values."""
    if issubclass(kind, dict):
        return (*kind.keys(container),), [*kind.values(container)]
    return (), [*kind.__iter__(container)]


class Contents:
    """What ``modules`` consist of now: see [Note: contents of modules].

    Modules have a thousand containers, which hardly ever change. So ``same`` must be fast, and it is so for empty
    containers and for dictionaries.
    """

    def __init__(self, modules: list[nn.Module], containers: dict[int, tuple[Any, Any]]) -> None:
        self.modules = modules
        self._containers = containers  # with their kinds, by their ids
        self._classes = [*map(type, modules)]
        held = [(container, kind) for container, kind in containers.values() if kind is not tuple]
        self._empty = [container for container, kind in held if type(container) is kind and not container]
        self._tables = [container for container, _ in held if container and type(container) is dict]
        self._sizes = [*map(len, self._tables)]
        self._keys = [*chain.from_iterable(self._tables)]
        self._values = [*chain.from_iterable(map(dict.values, self._tables))]
        self._named = self._names()
        others = [(c, kind) for c, kind in held if type(c) is not dict and (c or type(c) is not kind)]
        self._others = [(*other, _read(*other)) for other in others]

    @classmethod
    def of(cls, module: nn.Module) -> Contents:
        """The contents of ``module`` and of the modules inside it."""
        modules = [*module.modules()]
        containers: dict[int, tuple[Any, Any]] = {}
        level: Iterable[Any] = map(vars, modules)
        for _ in range(_DEPTH):
            new = {id(c): (c, _kind(type(c))) for c in level if id(c) not in containers and len(c) < _LONGEST}
            containers |= new
            inner = [v for container, kind in new.values() if container for v in _read(container, kind)[1]]
            level = [value for value in inner if _kind(type(value)) not in (None, object)]
            level += [vars(v) for v in inner if type(v).__dictoffset__ and _kind(type(v)) not in (None, type(v))]
        return cls(modules, containers)

    def _names(self) -> list[Any]:
        """The last attribute of each module, as a new one comes behind it, and the keys of all other dictionaries."""
        own, others = self._tables[: len(self.modules)], self._tables[len(self.modules) :]
        return [*map(next, map(reversed, own)), *chain.from_iterable(others)]

    def now(self) -> Contents:
        """What the same modules and containers consist of now. Others are not looked for."""
        return Contents(self.modules, self._containers)

    @property
    def generators(self) -> list[Any]:
        """The random generators in the containers."""
        values = chain(self._values, *(held for _, _, (_, held) in self._others))
        return [value for value in values if isinstance(value, GENERATORS)]

    def entries(self) -> Iterable[tuple[dict[str, Any], str, Any]]:
        """Every dictionary, key and value, attributes of modules and objects among them."""
        return zip(chain.from_iterable(map(repeat, self._tables, self._sizes)), self._keys, self._values, strict=True)

    def same(self) -> bool:
        """Whether all is as it was. Values are compared by identity, as they may be tensors."""
        return (
            not any(self._empty)
            and [*map(len, self._tables)] == self._sizes
            and self._names() == self._named
            and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._values))
            and [*map(type, self.modules)] == self._classes
            and all(_holds(*other) for other in self._others)
        )

    def put_back(self) -> None:
        """Restore modules and containers, the order of entries as well."""
        if self.same():
            return
        for module, cls in zip(self.modules, self._classes, strict=True):
            module.__class__ = cls
        for container in filter(None, self._empty):
            container.clear()
        keys, values = iter(self._keys), iter(self._values)
        for table, size in zip(self._tables, self._sizes, strict=True):
            _refill(table, dict, ((*islice(keys, size),), [*islice(values, size)]))
        for other in self._others:
            _refill(*other)


def _holds(container: Any, kind: Any, held: Any) -> bool:
    (keys, values), (keys_now, now) = held, _read(container, kind)
    return keys == keys_now and len(values) == len(now) and all(map(is_, values, now))


def _refill(container: Any, kind: Any, held: Any) -> None:
    if _holds(container, kind, held):
        return
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(*held, strict=True):
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, held[1])
