"""Updates of chunks in host memory in the order in which they are done, and how many of them are done by whom.

[Note: how many early updates] More are not always better. Gradients come in backward order, so what begins in time of
many early updates are chunks that the next forward needs last, and those that it needs first come after; of fewer it
may be all of them. The first pass knows when gradients arrive and when forward takes which chunk, and so for any number
how long that waits for updates; from the most that there may be it goes down until that does not fall any more.

[Note: how many streamed updates] Where forward waits for updates, the device takes a part of those that are not early,
with which it ends when the host does. How long forward waits then is known in the same way, and decides between this
number and those around it: uploads set in at different times. Here it counts that both are slower beside each other
and beside copies, as far as those keep the link busy: full rates would leave the host more than it can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from protrain.planning.layout import streamed_chunks

_TRIED = 3  # early updates, or streamed ones, fewer than what was best so far
_STEPS = 4  # from all early updates to none, to begin with, when others may be streamed


class Queue(NamedTuple):
    """What one of host and device updates."""

    updates: Sequence[tuple[int, float]]  # (chunk, ms), in execution order
    n_early: int  # of those, the first: done as gradients come if that begins before backward is over

    def ordered(self, in_time: int) -> Sequence[tuple[int, float]]:
        """In the order in which they are done: as gradients come, then as the next forward needs them.

        ``in_time`` of the early ones begin in time: those whose gradients come first.
        """
        first = self.n_early - in_time
        return [*self.updates[first : self.n_early][::-1], *self.updates[:first], *self.updates[self.n_early :]]

    def in_time(self, free: float, offloaded: Sequence[float], over: float, slower: float = 1.0) -> int:
        """How many early updates begin before backward is ``over``, by when their gradients are there."""
        for count, (chunk, duration) in enumerate(self.updates[: self.n_early][::-1]):
            start = max(free, offloaded[chunk])
            if start >= over:
                return count
            free = start + duration * slower
        return self.n_early


@dataclass(frozen=True, slots=True)
class Updating:
    """Who updates what in host memory, and how much of it early."""

    host_ms: Sequence[tuple[int, float]]  # (chunk, update on the host), in execution order
    n_early: int  # of those, the first: updated as gradients come if that begins before backward is over
    n_stream: int = 0  # updated by the device, none of them early unless all are
    streamed_ms: float = 1.0  # what the device takes for a millisecond's work of the host
    inside: bool = False  # all are early: updates wait for no step()
    chooses: bool = False  # n_early is how many there may be; see [Note: how many early updates]
    streams: bool = False  # n_stream is open; see [Note: how many streamed updates]

    @property
    def candidates(self) -> Sequence[tuple[int, float]]:
        """What the device may update."""
        return self.host_ms if self.inside else self.host_ms[self.n_early :]

    def queues(self) -> tuple[Queue, Queue]:
        """Of the host and of the device."""
        if not self.n_stream:
            return Queue(self.host_ms, self.n_early), Queue((), 0)
        chosen = set(streamed_chunks([chunk for chunk, _ in self.candidates], self.n_stream))
        host = [update for update in self.host_ms if update[0] not in chosen]
        device = [(chunk, duration * self.streamed_ms) for chunk, duration in self.host_ms if chunk in chosen]
        return Queue(host, len(host) if self.inside else self.n_early), Queue(device, len(device) if self.inside else 0)


class Moment(NamedTuple):
    """The end of a backward, as one pass of the simulation found it, and the forward before."""

    over: float
    free: tuple[float, float]  # host and device are
    offloaded: Sequence[float]  # by chunk: when its gradient was
    upload_ms: Sequence[float]  # by chunk
    uploads: list[tuple[int, float, float]]  # of forward, without updates to wait for: chunk, start and when it is used
    alone: float  # what an update on the host takes for each millisecond of its own,
    beside: tuple[float, float]  # and while the device works as well, and one by the device

    def wait_ms(self, updating: Updating) -> float:
        """How long the next forward waits for updates."""
        done = [0.0] * len(self.upload_ms)
        slower = self.beside if updating.n_stream else (self.alone, 1.0)
        works = list(zip(slower, updating.queues(), strict=True))
        for free, (factor, queue) in zip(self.free, works, strict=True):
            in_time = queue.in_time(free, self.offloaded, self.over, factor)
            for at, (chunk, duration) in enumerate(queue.ordered(in_time)):
                earliest = self.offloaded[chunk]
                start = max(free, earliest if at < in_time else max(self.over, earliest))
                free = done[chunk] = start + duration * factor
        link = wait = 0.0
        for chunk, start, use in self.uploads:
            link = max(link, start, done[chunk] - self.over) + self.upload_ms[chunk]
            wait = max(wait, link - use)
        if updating.streams:  # who has more to do than a step takes would fall behind from step to step
            wait = max(wait, *(sum(ms for _, ms in queue.updates) * factor - self.over for factor, queue in works))
        return wait

    def balanced(self, updating: Updating) -> int:
        """As many streamed updates as let host and device end together."""
        host, device = self.beside
        return round(len(updating.candidates) / (1 + updating.streamed_ms * device / host))


def uploads_of(
    fetched: Sequence[int], starts: Sequence[float], used: dict[int, float]
) -> list[tuple[int, float, float]]:
    """For :class:`Moment`, from what forward fetches, when, and when it uses which chunk first.

    What is fetched once more is for backward.
    """
    left = dict(used)
    return [(chunk, start, left.pop(chunk, inf)) for chunk, start in zip(fetched, starts, strict=False)]


def chosen(updating: Updating, moment: Moment) -> Updating:
    """With the numbers of early and streamed updates for which the next forward waits least."""
    none = _early(updating, moment) if updating.chooses else updating
    if not updating.streams:
        return none
    most = _early_beside_streamed(updating, moment) if updating.chooses else updating
    found, least = most, inf
    for n_stream in range(min(moment.balanced(most) + 1, len(most.candidates)), 0, -1):
        if found is not most and n_stream < found.n_stream - _TRIED:
            break
        fewer = replace(most, n_stream=n_stream)
        wait = moment.wait_ms(fewer)
        if wait <= least:
            found, least = fewer, wait
    return found if least < moment.wait_ms(none) else none


def _early(updating: Updating, moment: Moment) -> Updating:
    best, least = updating, moment.wait_ms(updating)
    none = replace(updating, n_early=0)
    if least >= moment.wait_ms(none):
        return none
    for n_early in range(updating.n_early - 1, 0, -1):
        if least <= 0 or n_early < best.n_early - _TRIED:
            break
        fewer = replace(updating, n_early=n_early)
        wait = moment.wait_ms(fewer)
        if wait <= least:
            best, least = fewer, wait
    return best


def _early_beside_streamed(updating: Updating, moment: Moment) -> Updating:
    """With the best number of early updates when others are streamed, looked for in steps that become smaller."""
    waits: dict[int, tuple[float, int]] = {}

    def wait(n_early: int) -> tuple[float, int]:
        if n_early not in waits:
            some = replace(updating, n_early=n_early)
            waits[n_early] = moment.wait_ms(replace(some, n_stream=moment.balanced(some))), n_early
        return waits[n_early]

    most = updating.n_early
    size = -(-most // _STEPS)
    best = min(range(most, -1, -size), key=wait)
    while size > 1:
        size //= 2
        best = min((n_early for n_early in (best - size, best, best + size) if 0 <= n_early <= most), key=wait)
    return replace(updating, n_early=best)
