"""States of random generators, so that a second run draws the numbers that the first has drawn.

[Note: shared generators] Code of a block may draw from the generators of Python and numpy that all code shares. To read
or set their states takes a tenth of a millisecond and more, which every block would pay four times a step, and hardly
any block draws from them. So a state is read once and kept until the generator changes. That shows in the memory of the
objects that make up the generator, in which CPython has their C fields: a copy of it takes less than a microsecond.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

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


def _fields(thing: object) -> Any:
    """The memory of the C fields of ``thing``, which must outlive it. ``raw`` of it is a copy."""
    head = object.__basicsize__
    return (ctypes.c_char * (type(thing).__basicsize__ - head)).from_address(id(thing) + head)


def _python_memory(generator: random.Random) -> Callable[[], object]:
    """A function that returns the memory of ``generator``."""
    fields, kept = _fields(generator), cast(Any, generator)
    return lambda: (fields.raw, kept.gauss_next)


def _numpy_memory(generator: np.random.RandomState) -> Callable[[], object]:
    """A function that returns the memory of ``generator``.

    If a script puts other bits there, these may keep their state elsewhere: no memory is equal to a new object.
    """
    kept = cast(Any, generator)
    bits = kept._bit_generator
    if type(bits) is not np.random.MT19937:
        return object
    fields, drawn = _fields(generator), _fields(bits)
    return lambda: (fields.raw, drawn.raw) if kept._bit_generator is bits else object()


def _shows_draws() -> bool:
    """Whether memory does show what is drawn, here where Python and numpy may be newer than any that was tried.

    The second of two normal numbers comes from what the first has kept, and leaves the other fields as they are.
    """
    python, numpy = random.Random(0), np.random.RandomState(0)
    draws_python = (python.random, partial(python.gauss, 0, 1), partial(python.gauss, 0, 1))
    draws_numpy = (numpy.random_sample, numpy.standard_normal, numpy.standard_normal)
    found = []
    for memory, draws in ((_python_memory(python), draws_python), (_numpy_memory(numpy), draws_numpy)):
        for draw in draws:
            before = memory()
            draw()
            found.append(memory() != before)
    return all(found)


_memories: tuple[Callable[[], object], ...] = (object, object)
if _shows_draws():  # of the generators that the functions of ``random`` and ``np.random`` draw from
    _memories = _python_memory(cast(Any, random)._inst), _numpy_memory(cast(Any, np.random.get_state).__self__)
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
        self._put_back += partial(_python.go_back, _python.state()), partial(_numpy.go_back, _numpy.state())
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
