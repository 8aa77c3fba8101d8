"""States of random generators, so that a recomputed block draws the numbers that it drew before."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from typing_extensions import override


class RandomState:
    """The state of the random generators now. Inside a ``with`` the same numbers are drawn again."""

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
    """A RandomState with the generators that code of a block may use: Python's ``random``, and those of its modules."""

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator]) -> None:
        super().__init__(device)
        self._python = random.getstate()
        self._generators = [(generator, generator.get_state()) for generator in generators]

    @override
    def set(self) -> None:
        super().set()
        random.setstate(self._python)
        for generator, state in self._generators:
            generator.set_state(state)

    @override
    def _now(self) -> RandomState:
        return BlockRandomState(self.device, [generator for generator, _ in self._generators])
