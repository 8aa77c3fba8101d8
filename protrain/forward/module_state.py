"""The content of a block's modules, so that a second run of the block finds what the first run found.

[Note: what a block changes] A forward may change its modules: it updates running statistics, counts its calls, or makes
tables when it first needs them. A second run must start from the same content, and leave behind what the first run has
left. So these are kept for each run: the parameters (torch.func.functional_call replaces them), which of them require a
gradient, copies of the buffers, and whether modules are in training mode. Large buffers are nearly always masks and
tables that nothing updates, and to copy them, or to compare all attributes, would cost too much in every run. So the
first run of a block in training mode, and the first in evaluation mode, is watched, to find the large buffers and the
modules' plain attributes (numbers, text, None) that it changes. From then on these are kept, too, beside the plain
attributes of modules with buffers. The plan does not count the memory of such copies. A large buffer that changes later
for the first time is found by its version, and the second run is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_not
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from protrain.common.parameters import same_bytes
from protrain.forward.rng import GENERATORS

TABLE_ELEMENTS = 1 << 16  # larger buffers are usually masks and tables
_PLAIN = frozenset({type(None), bool, int, float, complex, str})
_Content: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # a dictionary of a module, and what was in it


class BlockModules:
    """The modules of one block, and what is known about how its forward changes them.

    Parameters of the class ``watched_elsewhere`` are not watched for changes here, as their owner does that.
    """

    def __init__(self, module: nn.Module, watched_elsewhere: type[nn.Parameter]) -> None:
        self.module = module
        self.watched_elsewhere = watched_elsewhere
        self.modules = [*module.modules()]
        self.updated: set[tuple[nn.Module, str]] = set()  # large buffers that are copied before each run
        self.changing: set[nn.Module] = set()  # modules whose plain attributes a forward changes
        self._generators: set[tuple[nn.Module, str]] = set()  # attributes that are random generators
        self.watched: set[bool] = set()  # the modes, training or not, in which a run was watched
        self._parameters = [m._parameters for m in self.modules if m._parameters]
        self._own = [parameter for held in self._parameters for parameter in held.values()]

    def called(self) -> ModulesBefore:
        """The content of the modules at a call of the block."""
        watched = self.module.training not in self.watched
        if watched:
            self.find_generators()
        return ModulesBefore(self, watched=watched)

    @property
    def generators(self) -> list[Any]:
        """The random generators of the modules now, as the training loop may have replaced some."""
        found = (vars(module).get(name) for module, name in self._generators)
        return [value for value in found if isinstance(value, GENERATORS)]

    def find_generators(self) -> None:
        """Note which attributes are random generators now."""
        for module in self.modules:
            self._generators.update((module, name) for name, v in vars(module).items() if isinstance(v, GENERATORS))

    def parameters_now(self) -> Iterator[Any]:
        """What the modules have as their parameters: some may be None."""
        return chain.from_iterable(held.values() for held in self._parameters)

    def given_parameters(self) -> list[_Content]:
        """The parameters of all modules, if some of them are not the modules' own; otherwise nothing."""
        if not any(map(is_not, self.parameters_now(), self._own)):
            return []
        return [(held, held.copy()) for held in self._parameters]


@dataclass(frozen=True, slots=True)
class _Copy:
    """The copy of a buffer, which each further run gets a copy of, as it may update the buffer."""

    value: Tensor
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Table:
    """A large buffer that is not copied."""

    owner: nn.Module
    name: str
    buffer: Tensor
    version: int  # before the run


class _Attributes(NamedTuple):
    """The plain attributes of a module, and the names of all attributes."""

    plain: dict[str, Any]
    names: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Attributes:
        held = vars(module)
        return cls({name: value for name, value in held.items() if type(value) in _PLAIN}, frozenset(held))

    def among(self, module: nn.Module) -> dict[str, Any]:
        """These attributes and the others of ``module``, without attributes that were added since."""
        others = {name: v for name, v in vars(module).items() if name in self.names and type(v) not in _PLAIN}
        return others | self.plain


class ModulesBefore:
    """The content of the modules of ``block`` when its first run began."""

    def __init__(self, block: BlockModules, *, watched: bool) -> None:
        self._block = block
        self._watched = watched
        modules = block.modules
        self._training = [module.training for module in modules]
        self._parameters = block.given_parameters()
        self._requires_grad = [(p, p.requires_grad) for p in block.parameters_now() if p is not None]
        self._given = [  # without managed parameters: see [Note: edits]
            (parameter, _version(parameter))
            for _, held in self._parameters
            for parameter in held.values()
            if parameter is not None and not isinstance(parameter, block.watched_elsewhere)
        ]
        self._copies: dict[int, _Copy] = {}  # by the id of the buffer
        self._tables: list[_Table] = []
        self._buffers = {module: self._without_copied(module) for module in modules if module._buffers}
        self._plain = {m: _Attributes.of(m) for m in modules if watched or m._buffers or m in block.changing}

    def _without_copied(self, module: nn.Module) -> dict[str, Any]:
        """The buffers of ``module``, with those that a forward may update copied."""
        held: dict[str, Any] = module._buffers.copy()
        for name, buffer in held.items():
            if buffer is None:
                continue
            large = buffer.numel() > TABLE_ELEMENTS and (module, name) not in self._block.updated and not buffer.is_meta
            if large:
                self._tables.append(_Table(module, name, buffer, _version(buffer)))
            if (not large or (self._watched and buffer.layout == torch.strided)) and id(buffer) not in self._copies:
                # The copy of a large buffer is in host memory, as it is for a comparison only.
                value = buffer.detach().to("cpu" if large else buffer.device, copy=True)
                self._copies[id(buffer)] = _Copy(value, buffer.device)
            if not large:
                held[name] = self._copies[id(buffer)]
        return held

    def over(self) -> None:
        """The first run is over: note what it has changed. If it was watched, this waits for the device."""
        self._block.updated.update((t.owner, t.name) for t in self._tables if _version(t.buffer) != t.version)
        if not self._watched:
            return
        self._block.watched.add(self._training[0])
        self._block.find_generators()  # some are made at their first use
        tables = []
        for table in self._tables:
            copy = self._copies.get(id(table.buffer))
            # The versions do not show everything, as a write through .data has none.
            same = _version(table.buffer) == table.version
            if copy is None or (same and same_bytes(table.buffer.detach().cpu(), copy.value.cpu())):
                tables.append(table)
            else:
                self._block.updated.add((table.owner, table.name))
                self._buffers[table.owner][table.name] = copy
        self._tables = tables
        self._copies.clear()
        self._block.changing.update(module for module, held in self._plain.items() if _Attributes.of(module) != held)
        kept = self._buffers.keys() | self._block.changing
        self._plain = {module: held for module, held in self._plain.items() if module in kept}

    def given_changed(self) -> bool:
        """Whether a parameter that the engine does not manage has changed since the first run."""
        return any(_version(parameter) != version for parameter, version in self._given)

    def changed_table(self) -> str | None:
        """The name of a large buffer that has changed, so that a copy is missing. From now on it is copied."""
        for table in self._tables:
            if _version(table.buffer) != table.version:
                self._block.updated.add((table.owner, table.name))
                path = next(path for path, module in self._block.module.named_modules() if module is table.owner)
                return f"{path}.{table.name}" if path else table.name
        return None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context for another run, in which the modules have the content that the first run found."""
        made: dict[int, Tensor] = {}
        modules = self._block.modules
        with_buffers = [module for module in modules if module._buffers or module in self._buffers]
        held: list[_Content] = [
            *self._parameters,
            *((module._buffers, _with_copies(self._buffers.get(module, {}), made)) for module in with_buffers),
            *((vars(module), before.among(module)) for module, before in self._plain.items()),
        ]
        now = [(owner, owner.copy()) for owner, _ in held]
        training = [module.training for module in modules]
        switched = [(p, required) for p, required in self._requires_grad if p.requires_grad != required]
        try:
            _set(held)
            _switch(modules, self._training)
            for parameter, required in switched:
                parameter.requires_grad = required
            yield
        finally:
            _set(now)
            _switch(modules, training)
            for parameter, required in switched:
                parameter.requires_grad = not required


def _set(dictionaries: list[_Content]) -> None:
    for owner, held in dictionaries:
        if owner.keys() == held.keys():
            owner.update({name: value for name, value in held.items() if owner[name] is not value})
        else:  # to restore the order of entries, too
            owner.clear()
            owner.update(held)


def _switch(modules: list[nn.Module], training: list[bool]) -> None:
    for module, mode in zip(modules, training, strict=True):
        if module.training != mode:
            module.training = mode


def _with_copies(held: dict[str, Any], made: dict[int, Tensor]) -> dict[str, Any]:
    """``held`` with fresh copies of buffers. A buffer of several names has one copy."""
    found = {}
    for name, value in held.items():
        if isinstance(value, _Copy):
            if id(value) not in made:
                made[id(value)] = value.value.to(value.device, copy=True)
            value = made[id(value)]
        found[name] = value
    return found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
