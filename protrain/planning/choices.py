"""Choices of block modes as arrays: one row per choice, so that what depends on them is worked out for all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.plan import BlockMode


class Choices(NamedTuple):
    """Some choices of block modes. Arrays are transposed, [block, choice]: what is looked at is one block of all."""

    ckpt: NDArray[np.bool_]  # recomputed, whether inputs are moved or not
    swap: NDArray[np.bool_]
    ckpt_swap: NDArray[np.bool_]  # of the recomputed, those whose inputs are moved

    @classmethod
    def of(cls, choices: Sequence[Sequence[BlockMode]]) -> Choices:
        """From the modes of each, by block."""
        modes = np.array([mode for of_choice in choices for mode in of_choice], dtype=np.object_)
        columns = modes.reshape(len(choices), -1).T
        is_mode = {mode: np.ascontiguousarray(columns == mode) for mode in BlockMode}
        inputs_move = is_mode[BlockMode.CKPT_SWAP]
        return cls(is_mode[BlockMode.CKPT] | inputs_move, is_mode[BlockMode.SWAP], inputs_move)

    @classmethod
    def of_counts(cls, n_blocks: int, n_swap: NDArray[np.int64], n_ckpt: NDArray[np.int64]) -> Choices:
        """Of ``block_modes`` of these counts by choice, where no inputs are moved."""
        blocks, pairs = np.arange(n_blocks)[:, None], np.minimum(n_swap, n_ckpt)
        between = blocks < 2 * pairs  # swapped and recomputed ones by turns
        after = (blocks >= 2 * pairs) & (blocks < n_swap + n_ckpt)  # all of one kind
        odd = blocks % 2 == 1
        return cls(
            between & odd | after & (n_ckpt > n_swap), between & ~odd | after & (n_swap > n_ckpt), between & False
        )

    @property
    def n_choices(self) -> int:
        """How many there are."""
        return self.ckpt.shape[1]

    def moving(self, counts: NDArray[np.int64]) -> Choices:
        """The same with the inputs of the first so many recomputed blocks moved: a count by choice."""
        return self._replace(ckpt_swap=self.ckpt & (np.cumsum(self.ckpt, axis=0) <= counts))

    def common(self) -> tuple[BlockMode, ...]:
        """By block, whether all of them recompute it or all of them swap it; otherwise, and of its inputs, nothing."""
        recomputed, swapped = np.all(self.ckpt, axis=1), np.all(self.swap, axis=1)
        return tuple(
            BlockMode.SWAP if swaps else BlockMode.CKPT if recomputes else BlockMode.NONE
            for recomputes, swaps in zip(recomputed, swapped, strict=True)
        )

    def some(self, which: NDArray[np.intp]) -> Choices:
        """Those at the positions ``which``."""
        return Choices(self.ckpt[:, which], self.swap[:, which], self.ckpt_swap[:, which])
