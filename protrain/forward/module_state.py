"""The content of a block's modules, so that a second run of the block finds what the first run found.

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
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.parameters import same_bytes
from protrain.forward.contents import Contents
from protrain.forward.rng import SHARED

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

    def called(self) -> ModulesBefore:
        """The content of the modules at a call of the block."""
        if self._found is None or not self._found.contents.same():
            self._found = _Found(self.module, self.watched_elsewhere)
        return ModulesBefore(self, self._found)

    def forget(self) -> None:
        """The modules have changed, so what they consisted of must not be kept alive for later calls."""
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
        self._compared: dict[int, Tensor] = {}  # by the id, in host memory, until ``over``
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

    def over(self) -> None:
        """The first run is over: note what it has changed. If it was watched, this waits for the device."""
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
    def again(self) -> Iterator[None]:
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
