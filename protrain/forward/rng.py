"""States of random generators, so that a second run draws the numbers that the first has drawn.

[Note: shared generators] Code of a block may draw from the generators of Python and numpy that all code shares. To read
or set their states takes a tenth of a millisecond and more, which every block would pay four times a step, and hardly
any block draws from them. So a state is read once and kept until the generator changes. That shows in the memory of the
objects that make up the generator, in which CPython has their C fields: a copy of it takes a microsecond.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random)


class _SharedGenerator:
    """A generator that all code shares: see [Note: shared generators].

    Args:
        read: returns the state.
        write: sets the state to one that ``read`` has returned.
        memory: returns something that is equal to what it returned before only if the state is the same.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object], memory: Callable[[], object]) -> None:
        self._read, self._write, self._memory = read, write, memory
        self._seen: object = None  # the memory when the state was read
        self._state: Any = None

    def state(self) -> Any:
        """The state now. It is the same object until the generator changes."""
        seen = self._memory()
        if seen != self._seen:
            self._state, self._seen = self._read(), seen
        return self._state

    def go_back(self, state: Any) -> None:
        """Set the state to what ``state`` returned before."""
        if self.state() is not state:
            self._write(state)
            self._state, self._seen = state, self._memory()


def _memory_of(*things: object) -> object:
    """The C fields of ``things``."""
    head = object.__basicsize__
    return [ctypes.string_at(id(thing) + head, type(thing).__basicsize__ - head) for thing in things]


def _python_memory(generator: random.Random) -> object:
    kept: Any = generator
    return _memory_of(generator), kept.gauss_next


def _numpy_memory(generator: np.random.RandomState, bits: np.random.BitGenerator) -> object:
    # One that a script has put there may keep its state elsewhere. No memory is equal to a new object.
    return _memory_of(generator, bits) if type(bits) is np.random.MT19937 else object()


def _shows_draws() -> bool:
    """Whether memory does show what is drawn, here where Python and numpy may be newer than any that was tried.

    The second of two normal numbers comes from what the first has kept, and leaves the other fields as they are.
    """
    python, bits = random.Random(0), np.random.MT19937(0)
    numpy = np.random.RandomState(bits)
    found = []
    for draw in (python.random, partial(python.gauss, 0, 1), partial(python.gauss, 0, 1)):
        before = _python_memory(python)
        draw()
        found.append(_python_memory(python) != before)
    for draw in (numpy.random_sample, numpy.standard_normal, numpy.standard_normal):
        before = _numpy_memory(numpy, bits)
        draw()
        found.append(_numpy_memory(numpy, bits) != before)
    return all(found)


def _shared_numpy() -> object:
    module: Any = np.random
    return _numpy_memory(module.get_state.__self__, module.get_bit_generator())


_shared_python = partial(_python_memory, random._inst)  # the generator of the functions of ``random``
_memories: tuple[Callable[[], object], ...] = (_shared_python, _shared_numpy) if _shows_draws() else (object, object)
_python = _SharedGenerator(random.getstate, random.setstate, _memories[0])
_numpy = _SharedGenerator(partial(np.random.get_state, legacy=False), np.random.set_state, _memories[1])


class RandomState:
    """The state of torch's random generators now."""

    def __init__(self, device: torch.device) -> None:
        self._put_back: list[Callable[[], object]] = [partial(torch.set_rng_state, torch.get_rng_state())]
        if device.type == "cuda":
            self._put_back.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))

    def set(self) -> None:
        """Draw the same numbers from here on."""
        for put_back in self._put_back:
            put_back()


class BlockRandomState(RandomState):
    """A RandomState with what else code of a block may draw from: Python, numpy, and ``generators`` of its modules.

    Inside a ``with`` the same numbers are drawn again.
    """

    def __init__(self, device: torch.device, generators: Iterable[Any]) -> None:
        super().__init__(device)
        self._device, self._generators = device, [*generators]
        self._put_back += [partial(shared.go_back, shared.state()) for shared in (_python, _numpy)]
        self._put_back += map(_put_back, self._generators)

    def __enter__(self) -> None:
        self._restore = BlockRandomState(self._device, self._generators)
        self.set()

    def __exit__(self, *exception: object) -> None:
        self._restore.set()


def _put_back(generator: Any) -> Callable[[], object]:
    """A function that puts ``generator``, one of ``GENERATORS``, back to its present state."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state(legacy=False))
    if isinstance(generator, random.SystemRandom):  # it has no state
        return lambda: None
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return partial(setattr, bits, "state", bits.state)
