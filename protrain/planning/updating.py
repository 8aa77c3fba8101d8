"""Updates of chunks in host memory, in the order in which they are done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Queue(NamedTuple):
    """What one of host and device updates there."""

    updates: Sequence[tuple[int, float]]  # (chunk, ms), in execution order
    n_early: int  # of those, the first: updated as gradients come if that begins before backward is over

    def ordered(self, in_time: int) -> Sequence[tuple[int, float]]:
        """In the order in which they are done: as gradients come, then as the next forward needs them.

        ``in_time`` of the early ones begin in time: those whose gradients come first.
        """
        first = self.n_early - in_time
        return [*self.updates[first : self.n_early][::-1], *self.updates[:first], *self.updates[self.n_early :]]

    def in_time(self, free: float, offloaded: Sequence[float], over: float) -> int:
        """How many early updates begin before backward is ``over``, after ``free`` and when their gradients are there.

        ``offloaded`` is by chunk when they are.
        """
        for count, (chunk, duration) in enumerate(self.updates[: self.n_early][::-1]):
            start = free if free > offloaded[chunk] else offloaded[chunk]
            if start >= over:
                return count
            free = start + duration
        return self.n_early
