"""What a step does under one plan; :mod:`protrain.planning.runtime.simulate` works out when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protrain.planning.runtime.fetches import Fetch
from protrain.planning.runtime.updating import Queue

# What the simulation takes apart again and again is plain tuples: of named ones that takes three times as long.

# Under one choice of block modes what a turn takes: milliseconds of computing; of swapping, saved activations out after
# a forward, in before a backward (0: not swapped); in backward units whose activations it fetches when it begins, its
# own or ahead.
Work = tuple[float, float, tuple[int, ...]]

# Its index, chunk, ms to flatten it, ms to offload it, the staging buffer that it passes through (-1: none).
Gradient = tuple[int, int, float, float, int]


@dataclass(frozen=True, slots=True)
class Visit:
    """A unit's turn in forward or backward, under one number of persistent chunks."""

    name: str
    unit: int
    chunks: tuple[int, ...]  # in buffers, that it waits for
    gradients: tuple[Gradient, ...]  # backward


class Update(NamedTuple):
    """One that others wait for; see [Note: waiting for regions] in :mod:`protrain.planning.runtime.passes`."""

    lane: int  # HOST or STREAM
    chunk: int
    ms: float


class Step(NamedTuple):
    """Everything that a step does; times in milliseconds at full rate."""

    forward: Sequence[Visit]
    backward: Sequence[Visit]
    forward_fetches: Sequence[Sequence[Fetch]]  # by visit
    backward_fetches: Sequence[Sequence[Fetch]]
    forward_work: Sequence[Work]
    backward_work: Sequence[Work]
    upload_ms: Sequence[float]  # by chunk
    swap_ms: Sequence[float]  # by unit: its saved activations to the device
    device_update_ms: Sequence[tuple[int, float]]  # (chunk, update) of persistent chunks
    host: Queue  # of the others, but for those that make room
    streamed: Queue  # likewise, by the device
    after_ms: Sequence[float]  # by chunk: at least, from its update to the end of the next forward
    making_room: Mapping[int, Update]  # by gradient that has no room until one is over
