"""Updates of chunks in host memory, in the order in which they are done, and how many of them to do early.

[Note: early weights] An early update of the weight alone takes a share of what a whole one takes. Its states follow
when the host has done all that the next forward waits for ("deferred"), in execution order. They must be there before
the chunk's next gradient is: the engine issues nothing until then, as in [Note: waiting for regions]. Of all early
chunks the last in execution order has the first gradient, so that waits for all of them, and they never delay the next
early updates, whose gradients come after it. What is not begun in time is one whole update, with nothing deferred.

[Note: both kinds] Every weight alone is work that is done twice, so where the host has no time to spare as many early
updates are whole as it has memory for: the last in execution order. Their gradients come first, when the end of
backward is far away. Those that come last, which the next forward needs first, take less time as weights alone, and
their next gradients leave the host the most time for the states.

[Note: how many early updates] More are not always better. Gradients come in backward order, so what begins in time of
many early updates are chunks that the next forward needs last, and those that it needs first come after; of fewer it
may be all of them. The first pass knows when gradients arrive and when forward takes which chunk, and so for any number
how long that waits for updates; from the most that there may be it goes down until that does not fall any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

_TRIED = 3  # early updates fewer than what was best so far

Updates = Sequence[tuple[int, float]]  # (chunk, ms)


class Known(NamedTuple):
    """What is known when a backward is over, in the first step, where nothing has waited for updates."""

    free: float  # the host has done what came before
    over: float  # backward is
    offloaded: Sequence[float]  # by chunk: its gradient is in host memory
    uploads: Sequence[tuple[int, float, float]]  # of forward: chunk, start, when it is used
    uses: Sequence[float]  # by chunk, when forward uses it
    upload_ms: Sequence[float]  # by chunk
    n_at_once: int = 0  # uploads issued when forward begins, which go as their chunks are updated
    next_gradients: Sequence[float] = ()  # by chunk, its next one after ``over``, where nothing waits for updates
    step_ms: float = inf  # of a step in which nothing does


class Done(NamedTuple):
    """How far the host gets with one number of early updates."""

    in_time: int  # of the early ones
    free: float  # when all that is not deferred is over
    done: Sequence[float]  # by chunk, from the end of backward on; all early ones count as over together
    work_ms: float


class Queue(NamedTuple):
    """What one of host and device updates there."""

    updates: Updates  # in execution order
    n_early: int  # of those, the first: updated as gradients come if that begins before backward is over
    weight_share: float = 0.0  # of an update's time, where early ones make the weight alone; 0: they are whole
    n_whole: int = 0  # but for the last of them, which are: none where their number is still open

    def ordered(self, in_time: int) -> Updates:
        """In the order in which they are done: as gradients come, then as the next forward needs them.

        ``in_time`` of the early ones begin in time: those whose gradients come first.
        """
        first = self.n_early - in_time
        early = self._early()[:in_time]
        return [*early, *self.updates[:first], *self.updates[self.n_early :]]

    def deferred(self, in_time: int) -> Updates:
        """What follows them where ``in_time`` updates of weights alone began in time."""
        alone = self.n_early - self.n_whole
        return self.updates[self.n_early - in_time : alone][::-1] if self.weight_share else ()

    def in_time(self, free: float, offloaded: Sequence[float], over: float) -> int:
        """How many early updates begin before backward is ``over``, after ``free`` and when their gradients are there.

        ``offloaded`` is by chunk when they are.
        """
        for count, (chunk, duration) in enumerate(self._early()):
            start = free if free > offloaded[chunk] else offloaded[chunk]
            if start >= over:
                return count
            free = start + duration
        return self.n_early

    def _early(self) -> Updates:
        """The early ones as their gradients come."""
        early, whole = self.updates[: self.n_early][::-1], self.n_whole
        if not self.weight_share:
            return early
        return [*early[:whole], *((chunk, duration * self.weight_share) for chunk, duration in early[whole:])]

    def done(self, known: Known, limit_ms: float) -> Done | None:
        """How far the host gets with what is not deferred.

        None where the next forward has to wait for more than ``limit_ms``, by the upload of one chunk alone, which
        begins when that is updated.
        """
        over, offloaded, upload_ms, uses = known.over, known.offloaded, known.upload_ms, known.uses
        updates, share, free = self.updates, self.weight_share or 1.0, known.free
        done, first, work_ms = [0.0] * len(upload_ms), self.n_early, 0.0
        while first:
            chunk, duration = updates[first - 1]
            start = free if free > offloaded[chunk] else offloaded[chunk]
            if start >= over:
                break
            work_ms += duration * share
            free = start + duration * share
            first -= 1
        free = free if free > over else over
        settled = free - over
        for chunk, _ in updates[first : self.n_early]:
            done[chunk] = settled
        for late in (updates[:first], updates[self.n_early :]):
            for chunk, duration in late:
                work_ms += duration
                there = offloaded[chunk]
                free = (free if free > there else there) + duration
                done[chunk] = after = free - over
                if after + upload_ms[chunk] - uses[chunk] > limit_ms:
                    return None
        return Done(self.n_early - first, free, done, work_ms)

    def wait_ms(self, known: Known, limit_ms: float) -> float:
        """How long the next forward waits for updates, none deferred; above ``limit_ms`` any number above it."""
        found = self.done(known, limit_ms)
        if found is None:
            return inf
        upload_ms, done = known.upload_ms, found.done
        link = wait = 0.0
        for ready, chunk, use in sorted(
            [(start if start > done[chunk] else done[chunk], chunk, use) for chunk, start, use in known.uploads]
        ):
            if ready > link:
                link = ready
            link += upload_ms[chunk]
            if link - use > wait:
                wait = link - use
                if wait > limit_ms:
                    break
        return wait


def least_waiting(most: Queue, known: Known) -> Queue:
    """With the number of early updates that forward waits least for. See [Note: how many early updates]."""
    chosen, least = most, most.wait_ms(known, inf)
    none = most._replace(n_early=0)
    if least >= none.wait_ms(known, least):
        return none
    for n_early in range(most.n_early - 1, 0, -1):
        if least <= 0 or n_early < chosen.n_early - _TRIED:
            break
        fewer = most._replace(n_early=n_early)
        wait = fewer.wait_ms(known, least)
        if wait <= least:
            chosen, least = fewer, wait
    return chosen
