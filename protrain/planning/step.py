"""What a step does under one plan, before it is known when: what :mod:`protrain.planning.simulate` works out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protrain.planning.fetches import Fetch
from protrain.planning.updating import Queue


@dataclass(frozen=True, slots=True)
class Visit:
    """A unit's turn in forward or backward, under one number of persistent chunks."""

    name: str
    unit: int
    chunks: tuple[int, ...]  # in buffers, that it waits for
    gradients: tuple[tuple[int, bool], ...]  # backward: (index into Step.gradients, offloaded)


class Work(NamedTuple):
    """What a turn takes under one choice of block modes."""

    compute_ms: float
    swap_ms: float  # saved activations out after a forward, in before a backward; 0: not swapped
    swap_back: tuple[int, ...]  # in backward: units whose activations it fetches when it begins, its own or ahead


class Update(NamedTuple):
    """One that others wait for; see [Note: waiting for regions] in :mod:`protrain.planning.simulate`."""

    lane: int  # HOST or STREAM
    chunk: int
    ms: float


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that a step does; times in milliseconds at full rate."""

    forward: Sequence[Visit]
    backward: Sequence[Visit]
    forward_fetches: Sequence[Sequence[Fetch]]  # by visit
    backward_fetches: Sequence[Sequence[Fetch]]
    forward_work: Sequence[Work]
    backward_work: Sequence[Work]
    upload_ms: Sequence[float]  # by chunk
    swap_ms: Sequence[float]  # by unit: its saved activations to the device
    gradients: Sequence[tuple[int, float, float]]  # (chunk, flatten, offload)
    device_update_ms: Sequence[tuple[int, float]]  # (chunk, update) of persistent chunks
    host: Queue  # of the others, but for those that make room
    streamed: Queue  # likewise, by the device
    after_host_ms: float  # at least, from the last host update to the end of forward, where nothing is streamed
    making_room: Mapping[int, Update] = field(default_factory=dict)  # by gradient that has no room until one is over
    open_early: bool = False  # host.n_early is the most that there may be: [Note: how many early updates]
