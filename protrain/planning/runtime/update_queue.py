"""The order in which chunks in host memory are updated.

[Note: weight-only updates] A speculative update that computes only the weight takes a share of the time of a whole
update. The chunk's optimizer states are updated later ("deferred"), when the host has finished every update that the
next forward waits for, in execution order. They must be updated before the chunk's next gradient arrives: the engine
issues nothing until then, as in [Note: waiting for regions]. The last speculative chunk in execution order has the
first gradient, so that gradient waits for all deferred updates. Deferred updates therefore never delay the next
speculative updates, whose gradients arrive later still. A speculative update that does not begin before backward ends
is made as one whole update, and none of it is deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Updates = Sequence[tuple[int, float]]  # (chunk, ms)


class UpdateQueue(NamedTuple):
    """The updates of chunks in host memory.

    Updates inside backward are the speculative updates, or all updates with ``step_during_backward``. Such an update
    follows its gradient, unless backward ends before the update begins: then it is one of the updates after backward.
    """

    updates: Updates  # in execution order
    n_in_backward: int  # the first of them are updates inside backward
    n_weight_only: int = 0  # the first of n_in_backward compute only the weight
    weight_share: float = 1.0  # the time of an update of the weight alone, as a share of a whole update's

    def ordered(self, in_time: int) -> Updates:
        """All updates in the order in which they are made: as gradients arrive, then as the next forward needs them.

        ``in_time`` is how many updates inside backward begin before backward ends. Those are the ones whose gradients
        arrive first.
        """
        first = self.n_in_backward - in_time
        return [*self._in_backward()[:in_time], *self.updates[:first], *self.updates[self.n_in_backward :]]

    def deferred(self, in_time: int) -> Updates:
        """The updates of optimizer states that are left when ``in_time`` updates inside backward began in time."""
        return self.updates[self.n_in_backward - in_time : self.n_weight_only][::-1]

    def in_time(self, free: float, offloaded: Sequence[float], over: float) -> int:
        """How many updates inside backward begin before backward is ``over``.

        The lane is ``free`` from then on. ``offloaded`` says by chunk when its gradient is in host memory.
        """
        for count, (chunk, duration) in enumerate(self._in_backward()):
            start = free if free > offloaded[chunk] else offloaded[chunk]
            if start >= over:
                return count
            free = start + duration
        return self.n_in_backward

    def _in_backward(self) -> Updates:
        """The updates inside backward, in the order in which their gradients arrive."""
        weights, share = self.n_weight_only, self.weight_share
        whole = self.updates[weights : self.n_in_backward][::-1]
        return [*whole, *((chunk, duration * share) for chunk, duration in self.updates[:weights][::-1])]
