"""Fills the weights for a backward that the model runs inside its own forward (torch.autograd.grad) during the trace.

Such a backward belongs to the segment that it runs in. The weights of a block are on the device while the inner
backward goes through that block. With ``create_graph=True`` the graph of the gradients holds the weights until the
backward of the step. Then they stay filled and count as activations, because the engine copies weights that lie in
chunk buffers (``Engine.weight``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from protrain.profiler.stand_in_weights import StandInWeights


class InnerBackwards:
    """Fills the weights of blocks that an inner backward goes through, and empties them afterwards.

    Args:
        blocks: for each block, the indexes of its parameters.
        outer: indexes of the parameters of other units, which stay filled throughout.
        weights: the stand-ins of all parameters.
    """

    def __init__(self, blocks: Mapping[str, Sequence[int]], outer: Set[int], weights: StandInWeights) -> None:
        self.filled_block: str | None = None  # the block whose weights are filled for an inner backward
        self._blocks = blocks
        self._outer = outer
        self._weights = weights

    def reached(self, unit: str, active: Iterable[str], *, lasting: bool) -> None:
        """Fill the weights of ``unit`` for an inner backward. Its forward is over; its graph keeps them if ``lasting``.

        Raises:
            ValueError: one of the units ``active`` is a block, whose recomputation would not have that graph.
        """
        if unit not in self._blocks:
            return
        calling = next((path for path in active if path in self._blocks), None)
        if calling is not None:
            raise ValueError(
                f"the forward of {calling} computes gradients through {unit}, which does not work where the block is "
                "recomputed: call torch.autograd.grad in the module that calls the blocks, or only for what the block "
                "itself computes"
            )
        if lasting:
            self._weights.hold({*self._blocks[unit], *self._outer})
        else:
            if unit != self.filled_block:
                self.empty_block()
            self.filled_block = unit
            self._weights.fill(self._blocks[unit])

    def empty_block(self) -> None:
        """Empty the weights that the last inner backward filled."""
        if self.filled_block is not None:
            self._weights.empty(self._blocks[self.filled_block])
            self.filled_block = None
