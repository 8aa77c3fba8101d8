"""Updates of chunks in host memory, in the order in which they are made.

[Note: weight-only updates] A speculative update of the weight alone takes a share of the time of a whole one. Its
states follow when the host has done all that the next forward waits for ("deferred"), in execution order. They must be
there before the chunk's next gradient is: the engine issues nothing until then, as in [Note: waiting for regions].
The last speculative chunk in execution order has the first gradient, so that gradient waits for all deferred updates,
and they never delay the next speculative updates, whose gradients come after it. A speculative update that does not
begin in time is one whole update, and nothing of it is deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Updates = Sequence[tuple[int, float]]  # (chunk, ms)


class Queue(NamedTuple):
    """What one of host and device updates in host memory."""

    updates: Updates  # in execution order
    n_early: int  # the first of them: updated as their gradients come, if that begins before backward is over
    n_weight_only: int = 0  # the first of n_early: their weight alone
    weight_share: float = 1.0  # of the time of a whole update, for one of the weight alone

    def ordered(self, in_time: int) -> Updates:
        """In the order in which they are made: as gradients come, then as the next forward needs them.

        ``in_time`` early updates begin in time: those whose gradients come first.
        """
        first = self.n_early - in_time
        early = self._early()[:in_time]
        return [*early, *self.updates[:first], *self.updates[self.n_early :]]

    def deferred(self, in_time: int) -> Updates:
        """The states that are still to be updated where ``in_time`` early updates began in time."""
        return self.updates[self.n_early - in_time : self.n_weight_only][::-1]

    def in_time(self, free: float, offloaded: Sequence[float], over: float) -> int:
        """How many early updates begin before backward is ``over``, after ``free`` and when their gradients are there.

        ``offloaded`` says by chunk when its gradient is in host memory.
        """
        for count, (chunk, duration) in enumerate(self._early()):
            start = free if free > offloaded[chunk] else offloaded[chunk]
            if start >= over:
                return count
            free = start + duration
        return self.n_early

    def _early(self) -> Updates:
        """The early updates in the order in which their gradients come."""
        alone, share = self.n_weight_only, self.weight_share
        whole = self.updates[alone : self.n_early][::-1]
        return [*whole, *((chunk, duration * share) for chunk, duration in self.updates[:alone][::-1])]
