"""States of random generators, so that a second run draws the numbers that the first has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from typing_extensions import override

GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random)


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
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._generators = [*generators]
        self._put_back = [_put_back(generator) for generator in self._generators]

    @override
    def set(self) -> None:
        super().set()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
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
