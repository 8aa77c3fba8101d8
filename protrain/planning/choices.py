"""Choices of block modes as arrays: one row per choice, so that what depends on them is worked out for all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.plan import BlockMode

_CODES = {BlockMode.NONE: 0, BlockMode.CKPT: 1, BlockMode.SWAP: 2}


class Choices(NamedTuple):
    """Some choices of block modes. Arrays are transposed, [block, choice]: what is looked at is one block of all."""

    ckpt: NDArray[np.bool_]
    swap: NDArray[np.bool_]

    @classmethod
    def of(cls, choices: Sequence[Sequence[BlockMode]]) -> Choices:
        """From the modes of each, by block."""
        codes = np.array([[_CODES[mode] for mode in modes] for modes in choices], dtype=np.int8)
        columns = np.ascontiguousarray(codes.reshape(len(choices), -1).T)
        return cls(columns == _CODES[BlockMode.CKPT], columns == _CODES[BlockMode.SWAP])

    @property
    def n_choices(self) -> int:
        """How many there are."""
        return self.ckpt.shape[1]

    def some(self, which: NDArray[np.intp]) -> Choices:
        """Those at the positions ``which``."""
        return Choices(self.ckpt[:, which], self.swap[:, which])
