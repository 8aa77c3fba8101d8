"""What a step does, as plain records: ``protrain.planning.step`` makes them, ``protrain.planning.simulate`` runs them.

[Note: weight-only updates] A speculative update that computes only the weight takes a share of the time of a whole
update. The chunk's optimizer states are updated later ("deferred"), when the host has finished every update that the
next forward waits for, in execution order. They must be updated before the chunk's next gradient arrives: the engine
issues nothing until then, as in [Note: waiting for regions]. The last speculative chunk in execution order has the
first gradient, so that gradient waits for all deferred updates. Deferred updates therefore never delay the next
speculative updates, whose gradients arrive later still. A speculative update that does not begin before backward ends
is made as one whole update, and none of it is deferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protrain.planning.schedule import Fetch
from protrain.planning.sharing import Sharing

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


# The simulation unpacks Work and Fetch in its inner loop. They are plain tuples because unpacking a named tuple takes
# three times as long.

# What a visit takes under one choice of block modes:
#   milliseconds of computing;
#   milliseconds of its swap (0: not swapped): saved activations go out after a forward, and come in before a backward;
#   in backward, the units whose activations are fetched when the visit begins: its own, the next visit's, or both.
Work = tuple[float, float, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a visit of backward adds to the gradient of a chunk, and what is done with it under one placement."""

    number: int  # as a GradientPart
    chunk: int
    flatten_ms: float
    offload_ms: float
    staging: int  # the staging buffer that it is offloaded from; -1: it is not offloaded
    sum_up_ms: float | None  # to fetch the sum in host memory that it is added to; None: it is added to none
    sent: int  # the staging buffer that several ranks send the chunk's whole gradient from; -1: one rank
    reduce_ms: float  # of the reduction by several ranks; 0 if the chunk has not all its gradients yet


@dataclass(frozen=True, slots=True)
class Visit:
    """One call of a unit in forward, or the backward of that call, under one number of persistent chunks."""

    name: str
    unit: int
    chunks: tuple[int, ...]  # chunks in buffers that the visit waits for
    gradients: tuple[Gradient, ...]  # the gradients that it yields; in forward none


class AwaitedUpdate(NamedTuple):
    """An update that a gradient waits for: see [Note: waiting for regions] in ``protrain.planning.simulate``."""

    chunk: int
    ms: float


class PlannedStep(NamedTuple):
    """Everything that a step does. Times are in milliseconds at full rate."""

    n_forward: int  # the number of visits of forward, which those of backward follow
    visits: Sequence[Visit]
    work: Sequence[Work]  # by visit
    fetches: Sequence[Sequence[Fetch]]  # by visit: what is uploaded
    gathers: Sequence[Sequence[Fetch]]  # by visit: what ranks gather, persistent chunks too; none with one rank
    upload_ms: Sequence[float]  # by chunk
    gather_ms: Sequence[float]  # by chunk
    swap_in_ms: Sequence[float]  # by unit: its saved activations, or its offloaded inputs, back to the device
    device_update_ms: Sequence[tuple[int, float]]  # (chunk, update) of persistent chunks
    fetches_sums: bool  # whether any gradient is added to a sum in host memory
    host: UpdateQueue  # updates of chunks in host memory, without those in awaited_updates
    streamed_ms: Mapping[int, float]  # by chunk that the GPU may update in host memory: how long that takes
    device_kept: float  # the share of its rate that such an update keeps beside the host
    sharing: Sharing  # what the engine chooses these chunks by
    awaited_updates: Mapping[int, AwaitedUpdate]  # by gradient: the update whose region of host memory it waits for

    @property
    def gpu_ms(self) -> float:
        """How long the GPU is busy with what it does in any case. No step is shorter."""
        flatten_ms = sum(gradient.flatten_ms for visit in self.visits for gradient in visit.gradients)
        return sum(work[0] for work in self.work) + flatten_ms + sum(ms for _, ms in self.device_update_ms)
