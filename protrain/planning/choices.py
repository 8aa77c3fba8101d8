"""Choices of block modes as arrays, one column per choice, so that the memory model computes many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.plan import BlockMode


class Choices(NamedTuple):
    """Some choices of block modes. Arrays are [block, choice], as the memory model reads one block of all choices."""

    ckpt: NDArray[np.bool_]  # recomputed, whether its inputs are offloaded or not
    swap: NDArray[np.bool_]
    ckpt_swap: NDArray[np.bool_]  # recomputed from offloaded inputs

    @classmethod
    def of(cls, choices: Sequence[Sequence[BlockMode]]) -> Choices:
        """From the modes of each choice, by block."""
        modes = np.array([mode for of_choice in choices for mode in of_choice], dtype=np.object_)
        columns = modes.reshape(len(choices), -1).T
        is_mode = {mode: np.ascontiguousarray(columns == mode) for mode in BlockMode}
        offloads_inputs = is_mode[BlockMode.CKPT_SWAP]
        return cls(is_mode[BlockMode.CKPT] | offloads_inputs, is_mode[BlockMode.SWAP], offloads_inputs)

    @property
    def n_choices(self) -> int:
        """The number of choices."""
        return self.ckpt.shape[1]
