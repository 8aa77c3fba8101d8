"""Counts by their placement, for tests that choose block modes themselves, and what tests count of results."""

from __future__ import annotations

from protrain.planning.layout import Layout
from protrain.planning.plan import Counts
from protrain.planning.timeline import Timeline


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


def wasted_elements(layout: Layout) -> int:
    """Capacity that no parameter uses, over all chunks."""
    return sum(max(0, layout.chunk_elements - chunk.elements) for chunk in layout.chunks)


def busy_ms(timeline: Timeline, lane: int) -> float:
    """How long ``lane`` is busy."""
    return sum(operation.end_ms - operation.start_ms for operation in timeline.operations if operation.lane == lane)
