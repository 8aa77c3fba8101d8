"""Seeds, and states of random generators, so that a second run draws the numbers that the first has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import numpy as np
import torch

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
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state(legacy=False))
    if isinstance(generator, random.SystemRandom):  # it has no state
        return lambda: None
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return partial(setattr, bits, "state", bits.state)


def seed_of(*key: int) -> int:
    """A seed for ``key``, such as the seed of a run, a step and the number of a micro-batch.

    Numbers that are drawn with this seed depend neither on the rank nor on earlier draws.
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
