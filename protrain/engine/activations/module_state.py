"""What a block's modules hold: a block that runs again meets what its first run met.

[Note: what a block changes] A forward may change its modules. It updates running statistics, counts its calls, makes
tables when it first needs them. Run again it must start from the same, and leave behind what the first run left. So
what the modules have is kept for each run: the parameters (torch.func.functional_call gives them others), copies of the
buffers, and whether they train. To copy large buffers, which nearly always are masks and tables that nothing updates,
and to walk over all attributes would cost too much every time. So the first run of a block in training mode, and the
first in evaluation mode, is watched: which large buffers it changes, and whose plain attributes (numbers, text, None).
From then on those are kept too, in memory that no plan has counted, besides the plain attributes of modules with
buffers. A large buffer that is changed later for the first time is told by its version, and refused where the block
would run again.
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

from protrain.engine.weights.parameter import PresentParameter

_TABLE_ELEMENTS = 1 << 16  # larger buffers are mostly masks and tables
_PLAIN = frozenset({type(None), bool, int, float, complex, str})
_Held: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # one of a module's dictionaries, and what was in it


class BlockModules:
    """The modules of one block, and what is known of how its forward changes them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = [*module.modules()]
        self.updated: set[tuple[nn.Module, str]] = set()  # large buffers that are copied before each run
        self.changing: set[nn.Module] = set()  # those whose plain attributes a forward changes
        self._generators: set[tuple[nn.Module, str]] = set()  # where they have generators that they draw from
        self.watched: set[bool] = set()  # modes, training or not, in which a run was watched
        self._holding = [m._parameters for m in self.modules if m._parameters]
        self._own = [parameter for held in self._holding for parameter in held.values()]

    def called(self) -> ModulesBefore:
        """What the modules hold now that the block is called."""
        watched = self.module.training not in self.watched
        if watched:
            self.find_generators()
        return ModulesBefore(self, watched=watched)

    @property
    def generators(self) -> list[torch.Generator]:
        """What they draw from now: the loop may have put others in their place."""
        found = (vars(module).get(name) for module, name in self._generators)
        return [value for value in found if isinstance(value, torch.Generator)]

    def find_generators(self) -> None:
        """Note where there are generators now."""
        for module in self.modules:
            self._generators.update(
                (module, name) for name, v in vars(module).items() if isinstance(v, torch.Generator)
            )

    def given_parameters(self) -> list[_Held]:
        """The parameters where they are not the modules' own."""
        now = chain.from_iterable(held.values() for held in self._holding)
        if not any(map(is_not, now, self._own)):
            return []
        return [(held, held.copy()) for held in self._holding]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Stands for a buffer that is copied anew for each further run, as that may update it."""

    value: Tensor
    device: torch.device

    def again(self) -> Tensor:
        return self.value.to(self.device, copy=True)


@dataclass(frozen=True, slots=True)
class _Table:
    """A buffer that is not copied."""

    owner: nn.Module
    name: str
    buffer: Tensor
    version: int  # before the run


class _Attributes(NamedTuple):
    """The plain attributes of a module, and the names of all."""

    plain: dict[str, Any]
    names: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> _Attributes:
        held = vars(module)
        return cls({name: value for name, value in held.items() if type(value) in _PLAIN}, frozenset(held))

    def among(self, module: nn.Module) -> dict[str, Any]:
        """These and what else ``module`` has now, without what has been made since."""
        others = {name: v for name, v in vars(module).items() if name in self.names and type(v) not in _PLAIN}
        return others | self.plain


class ModulesBefore:
    """What the modules of ``block`` held when its first run began."""

    def __init__(self, block: BlockModules, *, watched: bool) -> None:
        self._block = block
        self._watched = watched
        modules = block.modules
        self._training = [module.training for module in modules]
        self._parameters = block.given_parameters()
        self._given = [  # [Note: edits] takes care of those that are the engine's
            (parameter, _version(parameter))
            for _, held in self._parameters
            for parameter in held.values()
            if parameter is not None and not isinstance(parameter, PresentParameter)
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
            large = buffer.numel() > _TABLE_ELEMENTS and (module, name) not in self._block.updated
            if large:
                self._tables.append(_Table(module, name, buffer, _version(buffer)))
            if (not large or (self._watched and buffer.layout == torch.strided)) and id(buffer) not in self._copies:
                # In host memory where it is only looked at: the plan has no room for copies of tables on the device.
                value = buffer.detach().to("cpu" if large else buffer.device, copy=True)
                self._copies[id(buffer)] = _Copy(value, buffer.device)
            if not large:
                held[name] = self._copies[id(buffer)]
        return held

    def over(self) -> None:
        """The first run is over: learn from it. Where it was watched, that waits for the device."""
        self._block.updated.update((t.owner, t.name) for t in self._tables if _version(t.buffer) != t.version)
        if not self._watched:
            return
        self._block.watched.add(self._training[0])
        self._block.find_generators()  # some are made when they are first needed
        tables = []
        for table in self._tables:
            copy = self._copies.get(id(table.buffer))
            # Not all that is written has a version: what goes through .data has none.
            if copy is None or (_version(table.buffer) == table.version and _same_bits(table.buffer, copy.value)):
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
        """Whether a parameter that the engine doesn't manage is no longer what the first run was given."""
        return any(_version(parameter) != version for parameter, version in self._given)

    def changed_table(self) -> str | None:
        """The name of a buffer that another run would need a copy of. From now on it is copied."""
        for table in self._tables:
            if _version(table.buffer) != table.version:
                self._block.updated.add((table.owner, table.name))
                path = next(path for path, module in self._block.module.named_modules() if module is table.owner)
                return f"{path}.{table.name}" if path else table.name
        return None

    @contextmanager
    def again(self) -> Iterator[None]:
        """The modules are as the first run met them, for another run."""
        made: dict[int, Tensor] = {}
        modules = self._block.modules
        with_buffers = [module for module in modules if module._buffers or module in self._buffers]
        held: list[_Held] = [
            *self._parameters,
            *((module._buffers, _with_copies(self._buffers.get(module, {}), made)) for module in with_buffers),
            *((vars(module), before.among(module)) for module, before in self._plain.items()),
        ]
        now = [(owner, owner.copy()) for owner, _ in held]
        training = [module.training for module in modules]
        try:
            _set(held)
            _switch(modules, self._training)
            yield
        finally:
            _set(now)
            _switch(modules, training)


def _set(dictionaries: list[_Held]) -> None:
    for owner, held in dictionaries:
        if owner.keys() == held.keys():
            owner.update({name: value for name, value in held.items() if owner[name] is not value})
        else:  # what is put back keeps its order
            owner.clear()
            owner.update(held)


def _switch(modules: list[nn.Module], training: list[bool]) -> None:
    for module, mode in zip(modules, training, strict=True):
        if module.training != mode:
            module.training = mode


def _with_copies(held: dict[str, Any], made: dict[int, Tensor]) -> dict[str, Any]:
    """``held`` with fresh copies; one for all names of a buffer."""
    found = {}
    for name, value in held.items():
        if isinstance(value, _Copy):
            if id(value) not in made:
                made[id(value)] = value.again()
            value = made[id(value)]
        found[name] = value
    return found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_bits(buffer: Tensor, copy: Tensor) -> bool:
    first, second = (tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (buffer, copy))
    return torch.equal(first, second)
