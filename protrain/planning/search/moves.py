"""What there is room for when inputs of recomputed blocks move to host memory; whose: [Note: whose inputs move].

Moving inputs takes time on the link and host memory and never makes anything faster but by what the device memory is
then used for, which is chunk buffers. So of all numbers of moved inputs that leave room for the same buffers the least
is the only one worth trying.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from protrain.planning.choices import Choices
from protrain.planning.memory.model import Bytes, MemoryModel
from protrain.planning.plan import block_modes


class Room(NamedTuple):
    """A number of moved inputs, and what fits beside."""

    n_ckpt_swap: int
    n_buffer: int
    swapped_bytes: int  # host memory of swapped blocks and of moved inputs


class Moves:
    """For one model on one machine."""

    def __init__(self, memory: MemoryModel) -> None:
        self._memory = memory
        self._known: dict[tuple[int, int], tuple[Bytes, Bytes]] = {}

    def activations(self, n_swap: int, n_ckpt: int) -> tuple[Bytes, Bytes]:
        """By the number of moved inputs, 0 to ``n_ckpt``: device bytes with their margin, and host bytes."""
        known = self._known.get((n_swap, n_ckpt))
        if known is None:
            modes = block_modes(len(self._memory.profile.blocks), n_swap, n_ckpt)
            choices = Choices.of([modes] * (n_ckpt + 1)).moving(np.arange(n_ckpt + 1))
            peak_bytes, _, swapped_bytes = self._memory.all_activations(choices)
            known = self._known[n_swap, n_ckpt] = self._memory.with_margin(peak_bytes), swapped_bytes
        return known

    def rooms(self, n_swap: int, n_ckpt: int, n_persist: int) -> list[Room]:
        """What is worth trying, from the least moved inputs on: every one has room for more buffers than those before.

        Empty when nothing fits.
        """
        memory = self._memory
        margined_bytes, swapped_bytes = self.activations(n_swap, n_ckpt)
        host_bytes = memory.host_bytes_beside(n_persist, 0) + swapped_bytes
        n_buffer = np.where(
            host_bytes <= memory.hardware.host_bytes, memory.most_buffers(n_persist, margined_bytes), -1
        )
        before = np.maximum.accumulate(np.append(-1, n_buffer[:-1]))
        return [
            Room(at, int(n_buffer[at]), int(swapped_bytes[at])) for at in np.flatnonzero(n_buffer > before).tolist()
        ]
