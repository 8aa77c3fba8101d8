"""Random states of a step: a recomputed block draws what it drew before."""

from __future__ import annotations

import torch


class RandomState:
    """The random numbers that the next operations would draw, to be drawn again inside a ``with``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        current = RandomState(self.device)
        self._restore = current
        self.set()

    def __exit__(self, *exception: object) -> None:
        self._restore.set()

    def set(self) -> None:
        """Draw these from here on."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)
