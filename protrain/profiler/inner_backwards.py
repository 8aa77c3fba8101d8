"""Weights for a backward that the model runs inside its forward (torch.autograd.grad) while it is traced.

Such a backward is part of the stretch that it runs in. A block has its weights there while its own part of it runs. But
with ``create_graph=True`` the graph of the gradients holds them until the step's backward: then they stay, and count as
activations, since the engine copies what lies in chunk buffers (``Engine.weight``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from protrain.profiler.weights import Weights


class InnerBackwards:
    """Hands out the weights of blocks.

    Args:
        blocks: per block the parameters that it owns.
        outer: parameters that other units own, which are always there.
        weights: all of them.
    """

    def __init__(self, blocks: Mapping[str, Sequence[int]], outer: Set[int], weights: Weights) -> None:
        self.lent: str | None = None  # the block that has its weights for now
        self._blocks = blocks
        self._outer = outer
        self._weights = weights
        self._held: set[int] = set()  # parameters that a graph of gradients holds

    def reached(self, unit: str, active: Iterable[str], *, lasting: bool) -> None:
        """Such a backward needs the weights of ``unit``, whose forward is over; its graph holds them if ``lasting``.

        Raises:
            ValueError: one of the units ``active`` is a block, whose recomputation would not have that graph.
        """
        if unit not in self._blocks:
            return
        calling = next((path for path in active if path in self._blocks), None)
        if calling is not None:
            raise ValueError(
                f"the forward of {calling} computes gradients through {unit}, which a block that is recomputed cannot: "
                "call torch.autograd.grad in the module that calls the blocks, or for what the block itself computes"
            )
        if lasting:
            self._weights.keep(self._blocks[unit])
            held = {*self._blocks[unit], *self._outer} - self._held
            self._held |= held
            self._weights.count(held)
        else:
            if unit != self.lent:
                self.give_back()
            self.lent = unit
            self._weights.fill(self._blocks[unit])

    def give_back(self) -> None:
        """What was lent is not needed any more."""
        if self.lent is not None:
            self._weights.empty(self._blocks[self.lent])
            self.lent = None
