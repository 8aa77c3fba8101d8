"""Counts by their placement, for tests that choose block modes themselves."""

from __future__ import annotations

from protrain.planning.plan import Counts


def placed(n_persist: int, n_buffer: int, n_speculate: int = 0, n_weight_only: int = 0) -> Counts:
    """Counts of a runtime model's call, which takes the blocks' modes apart from them."""
    return Counts(
        n_persist,
        n_buffer,
        n_swap=0,
        n_ckpt=0,
        n_speculate=n_speculate,
        n_weight_only=n_weight_only,
    )
