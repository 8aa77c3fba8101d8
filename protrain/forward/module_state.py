"""The content of a block's modules and of random generators, so that a second run finds what the first run found.

[Note: what a block finds] A second run must start from what the modules were at the call, and leave behind what they
are when it begins. A script may change modules between the two (it switches adapters, sets numbers, removes hooks), and
so may the forward itself. So each call keeps what its modules consist of: see [Note: contents of modules]. It keeps
which parameters require a gradient, too.

[Note: tensors of modules] What is written into a tensor, such as a buffer, is kept only by a copy. Most buffers are
masks and tables that nothing writes to, and to copy them in every call would take memory and time. So the first run of
a block in training mode, and the first in evaluation mode, is watched: it compares the modules' tensors with copies in
host memory. So does a later run with a tensor that is the first in its place. A tensor that a run has changed is copied
in every later call. The others keep the copy in host memory, which stands in if the tensor's version shows that it was
written to since the call. A tensor of more than ``TABLE_ELEMENTS`` has no copy, as it may be one of many quantized
weights, nor has one that takes the place of another. If one of these is written to between a call and its second run,
the second run is refused, and later calls copy it.

[Note: shared generators] Code of a block may draw from the generators of Python and numpy that all code shares. To read
or set their states takes a tenth of a millisecond, and hardly any block draws from them. So a watched run shows whether
the block does, and later calls keep the states only then.

[Note: contents of modules] The contents of modules are their classes and attributes, and what these lead to: the
contents of lists, dictionaries and sets (a module's hooks, parameters, buffers and submodules lie in such), and the
attributes of other objects, such as configurations and tensors. Nothing is copied: a tensor is the same tensor,
whatever is written to it. Some things are not looked into: functions, with what they close over; objects of torch, of
threads and of queues, which others use meanwhile; objects with slots, and objects of C; what lies deeper than
``_DEPTH``, and in containers of ``_LONGEST`` entries and more.
"""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from protrain.common.parameters import same_bytes

GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random)
# The generators that the functions of ``random`` and ``np.random`` draw from, which all code shares.
SHARED: tuple[Any, ...] = cast(Any, random)._inst, cast(Any, np.random.get_state).__self__


class RandomState:
    """The states of torch's generators and of ``generators`` now. Inside a ``with`` the same is drawn again."""

    def __init__(self, device: torch.device, generators: Iterable[Any] = ()) -> None:
        self._device, self._generators = device, [*generators]
        self._put_back: list[Callable[[], object]] = [partial(torch.set_rng_state, torch.get_rng_state())]
        if device.type == "cuda":
            self._put_back.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))
        self._put_back += map(_put_back, self._generators)

    def set(self) -> None:
        """Draw the same numbers from here on."""
        for put_back in self._put_back:
            put_back()

    def __enter__(self) -> None:
        self._restore = RandomState(self._device, self._generators)
        self.set()

    def __exit__(self, *exception: object) -> None:
        self._restore.set()


def _put_back(generator: Any) -> Callable[[], object]:
    """A function that puts ``generator``, one of ``GENERATORS``, back to its present state."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.SystemRandom):  # it has no state
        return lambda: None
    own: Any = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return partial(own.__setstate__, own.__getstate__())


def seed_of(*key: int) -> int:
    """A seed for ``key``, such as the seed of a run, a step and the number of a micro-batch.

    Numbers that are drawn with this seed depend neither on the rank nor on earlier draws.
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


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


class _Alike:
    """The filled ``containers`` of one builtin ``kind``, and what they hold when this is made."""

    def __init__(self, kind: Any, containers: list[Any]) -> None:
        self._kind, self.containers = kind, containers
        self._named = issubclass(kind, dict)
        self.sizes, self.keys, self.values = self._read(containers)

    def _read(self, containers: list[Any]) -> tuple[list[int], list[Any], list[Any]]:
        """The sizes of containers, the keys of all together if they are dictionaries, and the values of all."""
        keys = [*chain.from_iterable(map(self._kind.keys, containers))] if self._named else []
        values = chain.from_iterable(map(self._kind.values if self._named else self._kind.__iter__, containers))
        return [*map(self._kind.__len__, containers)], keys, [*values]

    def same(self) -> bool:
        """Whether all of them hold what they held. Values are compared by identity, as they may be tensors."""
        sizes, keys, values = self._read(self.containers)
        return sizes == self.sizes and keys == self.keys and all(map(is_, values, self.values))

    def put_back(self) -> None:
        """Let each hold what it held, in the same order."""
        kind, all_keys, all_values = self._kind, iter(self.keys), iter(self.values)
        for container, size in zip(self.containers, self.sizes, strict=True):
            keys, values = [*islice(all_keys, size)], [*islice(all_values, size)]
            kind.clear(container)
            for key, value in zip(keys, values, strict=False):  # a list has no keys
                kind.__setitem__(container, key, value)
            if not self._named:
                (kind.update if kind is set else kind.extend)(container, values)


class Contents:
    """What ``modules`` consist of now: see [Note: contents of modules].

    Modules have a thousand containers, which hardly ever change. So ``same`` must be fast: it reads all containers of a
    kind at once, and of the empty ones only whether they are still empty.
    """

    def __init__(self, modules: list[nn.Module], containers: dict[int, tuple[Any, Any]]) -> None:
        self.modules = modules
        self._containers = containers  # with their kinds, by their ids
        self._classes = [*map(type, modules)]
        self._empty: list[Any] = []
        filled: dict[Any, list[Any]] = {}
        for container, kind in containers.values():
            if kind is not tuple:
                (filled.setdefault(kind, []) if len(container) else self._empty).append(container)
        self._filled = [_Alike(kind, alike) for kind, alike in filled.items()]

    @classmethod
    def of(cls, module: nn.Module) -> Contents:
        """The contents of ``module`` and of the modules inside it."""
        modules = [*module.modules()]
        containers: dict[int, tuple[Any, Any]] = {}
        level: Iterable[Any] = map(vars, modules)
        for _ in range(_DEPTH):
            new = {id(c): (c, _kind(type(c))) for c in level if id(c) not in containers and len(c) < _LONGEST}
            containers |= new
            inner = [*chain.from_iterable(_Alike(kind, [container]).values for container, kind in new.values())]
            level = [value for value in inner if _kind(type(value)) not in (None, object)]
            level += [vars(v) for v in inner if type(v).__dictoffset__ and _kind(type(v)) not in (None, type(v))]
        return cls(modules, containers)

    def now(self) -> Contents:
        """What the same modules and containers consist of now. Others are not looked for."""
        return Contents(self.modules, self._containers)

    @property
    def generators(self) -> list[Any]:
        """The random generators in the containers."""
        return [value for alike in self._filled for value in alike.values if isinstance(value, GENERATORS)]

    def entries(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """Every dictionary, key and value, attributes of modules and objects among them."""
        for alike in self._filled:
            tables = chain.from_iterable(map(repeat, alike.containers, alike.sizes))
            entries = zip(tables, alike.keys, alike.values, strict=False)  # a list has no keys
            yield from (entry for entry in entries if type(entry[0]) is dict)

    def same(self) -> bool:
        """Whether all is as it was."""
        return (
            all(alike.same() for alike in self._filled)
            and [*map(type, self.modules)] == self._classes
            and not any(map(len, self._empty))
        )

    def put_back(self) -> None:
        """Restore modules and containers, the order of entries as well."""
        if self.same():
            return
        for module, cls in zip(self.modules, self._classes, strict=True):
            module.__class__ = cls
        for container in filter(len, self._empty):
            container.clear()
        for alike in self._filled:
            if not alike.same():
                alike.put_back()


TABLE_ELEMENTS = 1 << 22  # larger tensors of modules are usually quantized weights, which nothing writes to
_UNKNOWN = (None, None, None)


class _Found:
    """What matters of the contents of a block's modules, found once for all calls between which nothing changes."""

    def __init__(self, module: nn.Module, managed: type[nn.Parameter]) -> None:
        self.contents = Contents.of(module)
        self.parameters = [p for m in self.contents.modules for p in m._parameters.values() if p is not None]
        # The tensors that may be written to, each with the dictionary and the key where it lies, and this place.
        self.entries = [
            (table, key, value, (id(table), key))
            for table, key, value in self.contents.entries()
            if isinstance(value, Tensor) and not (isinstance(value, managed) or value.is_inference())
        ]


class BlockModules:
    """The modules of one block, and what is known about how its forward changes them.

    Parameters of the class ``watched_elsewhere`` are not watched for changes here, as their owner does that: see
    [Note: edits].
    """

    def __init__(self, module: nn.Module, watched_elsewhere: type[nn.Parameter]) -> None:
        self.module = module
        self.watched_elsewhere = watched_elsewhere
        self.updated = set[tuple[int, str]]()  # the places of the tensors that are copied in each call
        # Tensors that a run has not changed, by their places, with their versions and copies in host memory.
        self.constants: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self.drawn = set[Any]()  # the generators of Python and numpy from which a forward draws
        self.watched = set[bool]()  # the modes, training or not, in which a run was watched
        self._found: _Found | None = None  # at the last call, unless the modules have changed since

    def at_call(self) -> ModulesBefore:
        """The content of the modules at a call of the block."""
        if self._found is None or not self._found.contents.same():
            self._found = _Found(self.module, self.watched_elsewhere)
        return ModulesBefore(self, self._found)

    def forget(self) -> None:
        """Drop what was found, as the modules have changed, and nothing may be kept alive for later calls."""
        self._found = None


class ModulesBefore:
    """The content of the modules of ``block``, which is ``found``, when a first run begins."""

    def __init__(self, block: BlockModules, found: _Found) -> None:
        self._block = block
        self._contents = found.contents
        watched = block.module.training not in block.watched
        self._shared = {generator: pickle.dumps(generator) for generator in SHARED if watched}
        self.generators = [*found.contents.generators, *(self._shared or block.drawn)]
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in found.parameters]
        self._entries = [(*entry, entry[2]._version) for entry in found.entries]
        self.copies: dict[int, Tensor] = {}  # of tensors that a forward changes, by their ids; they take device memory
        self._compared: dict[int, Tensor] = {}  # by the id, in host memory, until ``first_run_ends``
        for _, _, tensor, place, version in self._entries:
            if tensor.requires_grad or isinstance(tensor, nn.Parameter):  # part of a graph, or a weight
                continue
            known, constant, _ = block.constants.get(place, _UNKNOWN)
            if known is tensor and constant != version:  # it was written to between two calls
                block.updated.add(place)
            new = watched or (known is None and tensor.numel() <= TABLE_ELEMENTS)
            if place in block.updated or tensor.is_meta:
                self.copies[id(tensor)] = tensor.detach().clone()
            elif new and tensor.layout == torch.strided:
                self._compared[id(tensor)] = tensor.detach().to("cpu", copy=True)

    def first_run_ends(self) -> None:
        """End the first run: record what it has changed. If it was watched, this waits for the device."""
        self._block.watched.add(self._block.module.training)
        self._block.drawn.update(g for g, before in self._shared.items() if pickle.dumps(g) != before)
        for _, _, tensor, place, version in self._entries:
            copy = self._compared.pop(id(tensor), None)
            # The versions do not show everything, as a write through .data has none.
            if tensor._version != version or not (copy is None or same_bytes(tensor.detach().cpu(), copy)):
                self._block.updated.add(place)
                if copy is not None:
                    self.copies[id(tensor)] = copy
            elif copy is not None and tensor.numel() <= TABLE_ELEMENTS:
                self._block.constants[place] = tensor, version, copy

    def changed_tensor(self) -> str | None:
        """The name of a tensor that has changed, so that a copy is missing. From now on it is copied."""
        for _, key, tensor, place, version in self._entries:
            if tensor._version != version and self._copy(tensor, place, version) is None:
                self._block.updated.add(place)
                return key
        return None

    def _copy(self, tensor: Tensor, place: tuple[int, str], version: int) -> Tensor | None:
        """The copy that stands in for ``tensor``, of which the first run found ``version``."""
        known, constant, copy = self._block.constants.get(place, _UNKNOWN)
        changed = known is tensor and constant == version != tensor._version
        return self.copies.get(id(tensor), copy if changed else None)

    def undo(self) -> None:
        """Put the modules back to how they were, as if the first run, which is over, had never been."""
        self._contents.put_back()
        with torch.no_grad():
            for _, _, tensor, *_ in self._entries:
                if id(tensor) in self.copies:
                    tensor.copy_(self.copies[id(tensor)])

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """A context for another run, in which the modules have the content that the first run found."""
        before = now = self._contents
        switched = [(p, required) for p, required in self._requires_grad if p.requires_grad != required]
        made: dict[int, Tensor] = {}  # a tensor with several names has one copy
        try:
            if not before.same():
                now = before.now()
                self._block.forget()
                before.put_back()
            for table, key, tensor, place, version in self._entries:
                if (copy := self._copy(tensor, place, version)) is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = copy.to(tensor.device, copy=True)
                    table[key] = made[id(tensor)]
            for parameter, required in switched:
                parameter.requires_grad = required
            yield
        finally:
            now.put_back()
            for parameter, required in switched:
                parameter.requires_grad = not required
