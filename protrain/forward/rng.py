"""States of random generators, so that a second run draws the numbers that the first has drawn."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from typing_extensions import override

GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random)
_MT19937_BYTES = 624 * 4 + 4  # the words and the position


class _Numpy:
    """numpy's global generator, whose state is told and set only if something was drawn since.

    numpy takes as long for either as a small block for its forward. So the memory of the generator is compared first.
    It is all of the state unless numpy keeps the second number of a pair of normal ones.
    """

    def __init__(self) -> None:
        self._memory, self._state = b"", dict[str, Any]()

    def state(self) -> dict[str, Any]:
        """The state: the same object as at the last call if nothing was drawn since."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        plain = isinstance(generator, np.random.MT19937)
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) if plain else b""
        if not memory or memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, np.random.get_state(legacy=False)
        return self._state

    def set(self, state: dict[str, Any]) -> None:
        """Put the generator back to ``state``."""
        if self.state() is not state:
            self._memory = b""
            np.random.set_state(state)


_numpy = _Numpy()


class RandomState:
    """The state of torch's random generators now. Inside a ``with`` the same numbers are drawn again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        self._restore = self._now()
        self.set()

    def __exit__(self, *exception: object) -> None:
        self._restore.set()

    def set(self) -> None:
        """Draw the same numbers from here on."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)

    def _now(self) -> RandomState:
        return RandomState(self.device)


class BlockRandomState(RandomState):
    """A RandomState with what else code of a block may draw from: Python, numpy, and ``generators`` of its modules."""

    def __init__(self, device: torch.device, generators: Iterable[Any]) -> None:
        super().__init__(device)
        self._python, self._numpy = random.getstate(), _numpy.state()
        self._generators = [*generators]
        self._put_back = [_put_back(generator) for generator in self._generators]

    @override
    def set(self) -> None:
        super().set()
        random.setstate(self._python)
        _numpy.set(self._numpy)
        for set_state in self._put_back:
            set_state()

    @override
    def _now(self) -> RandomState:
        return BlockRandomState(self.device, self._generators)


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
