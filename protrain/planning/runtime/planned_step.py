"""What a step does under one plan. ``protrain.planning.runtime.simulate`` works out when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protrain.planning.runtime.fetches import Fetch
from protrain.planning.runtime.update_queue import UpdateQueue
from protrain.planning.sharing import Sharing

# The simulation unpacks Work, Gradient and Fetch in its inner loop. They are plain tuples because unpacking a named
# tuple field by field takes three times as long.

# What a visit takes under one choice of block modes:
#   milliseconds of computing;
#   milliseconds of its swap (0: not swapped): saved activations go out after a forward, and come in before a backward;
#   in backward, the units whose activations are fetched when the visit begins: its own, the next visit's, or both.
Work = tuple[float, float, tuple[int, ...]]

# Index, chunk, ms to flatten it, ms to offload it, the staging buffer that it is offloaded from (-1: none).
Gradient = tuple[int, int, float, float, int]


@dataclass(frozen=True, slots=True)
class Visit:
    """One call of a unit in forward, or the backward of that call, under one number of persistent chunks."""

    name: str
    unit: int
    chunks: tuple[int, ...]  # chunks in buffers that the visit waits for
    gradients: tuple[Gradient, ...]  # the gradients that it yields; in forward none


class AwaitedUpdate(NamedTuple):
    """An update that a gradient waits for: see [Note: waiting for regions] in ``protrain.planning.runtime.run``."""

    chunk: int
    ms: float


class Reduction(NamedTuple):
    """What several ranks do with a gradient, as they reduce the gradients of a chunk together, once it has all."""

    sent: int  # the staging buffer that the chunk's whole gradient is sent from
    ms: float  # of the reduction; 0 if the chunk has not all its gradients yet


class PlannedStep(NamedTuple):
    """Everything that a step does. Times are in milliseconds at full rate."""

    n_forward: int  # the number of visits of forward, which those of backward follow
    visits: Sequence[Visit]
    work: Sequence[Work]  # by visit
    fetches: Sequence[Sequence[Fetch]]  # by visit: what is uploaded
    gathers: Sequence[Sequence[Fetch]]  # by visit: what ranks gather, persistent chunks too; none with one rank
    upload_ms: Sequence[float]  # by chunk
    gather_ms: Sequence[float]  # by chunk
    reductions: Mapping[int, Reduction]  # by gradient; none with one rank
    swap_in_ms: Sequence[float]  # by unit: its saved activations, or its offloaded inputs, back to the device
    device_update_ms: Sequence[tuple[int, float]]  # (chunk, update) of persistent chunks
    sum_up_ms: Mapping[int, float]  # by gradient: the sum in host memory that it is added to, on its way to the device
    host: UpdateQueue  # updates of chunks in host memory, without those in awaited_updates
    streamed_ms: Mapping[int, float]  # by chunk that the GPU may update in host memory: how long that takes
    device_kept: float  # the share of its rate that such an update keeps beside the host
    sharing: Sharing  # what the engine chooses these chunks by
    awaited_updates: Mapping[int, AwaitedUpdate]  # by gradient: the update whose region of host memory it waits for
