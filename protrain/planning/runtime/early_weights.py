"""How many early updates of weights alone to do, of those that there is room for.

[Note: how many early weights] As with whole ones ([Note: how many early updates] in
:mod:`protrain.planning.runtime.updating`) the first pass knows when gradients arrive and when forward takes which
chunk. Weights alone come of more chunks, in less time, and many of them are there before those that forward takes
first. So it matters in what order uploads go, which is that of the engine: of those issued at once the nearest that is
updated, then the others in turn. And the deferred updates make backward wait for what is left of them when a chunk's
next gradient is there. Every weight alone is work on top: where all of it takes longer than a step, the host falls
behind until steps take as long as that. Between numbers that make a step wait for as long at full rate decides when the
last upload is done: that is what is left for disturbances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from protrain.planning.runtime.step import Step
from protrain.planning.runtime.updating import Known, Queue

_TRIED = 3  # early updates fewer than what was best so far


def next_gradients(step: Step, offloads: Sequence[float], device_ms: float) -> list[float]:
    """By chunk, when its first gradient of the next backward is offloaded, from the end of the first one on.

    ``offloads`` are when those of the first began. The next backward begins when persistent chunks are updated, which
    takes ``device_ms``, and a forward is over, as the first one did.
    """
    found = [inf] * len(step.upload_ms)
    chunks = (chunk for visit in step.backward for _, chunk, _, _, staging in visit.gradients if staging >= 0)
    for chunk, start in zip(chunks, offloads, strict=True):
        found[chunk] = min(found[chunk], device_ms + start)
    return found


def least_waiting_weights(most: Queue, known: Known) -> Queue:
    """With the number of early updates that the step waits least for."""
    chosen, least = most, _waits(most, known, inf)
    for n_early in range(most.n_early - 1, -1, -1):
        if n_early < chosen.n_early - _TRIED:
            break
        fewer = most._replace(n_early=n_early)
        waits = _waits(fewer, known, least[0])
        if waits <= least:
            chosen, least = fewer, waits
    return chosen


def _waits(queue: Queue, known: Known, limit_ms: float) -> tuple[float, float]:
    """How long the next forward and backward wait for updates, and when the last upload of that forward is done.

    If the wait is above ``limit_ms``, any number above it.
    """
    over, upload_ms = known.over, known.upload_ms
    found = queue.done(known, limit_ms)
    if found is None:
        return inf, inf
    free, done, deferred = found.free, found.done, queue.deferred(found.in_time)
    behind_ms = sum((duration for _, duration in deferred), found.work_ms) - known.step_ms
    if behind_ms > limit_ms:
        return behind_ms, inf
    wait = link = 0.0
    for chunk, use in _at_once(known, done):
        start = done[chunk]
        link = (start if start > link else link) + upload_ms[chunk]
        if link - use > wait:
            wait = link - use
            if wait > limit_ms:
                return wait, inf
    for chunk, start, use in known.uploads[known.n_at_once :]:
        if done[chunk] > start:
            start = done[chunk]
        link = (start if start > link else link) + upload_ms[chunk]
        if link - use > wait:
            wait = link - use
            if wait > limit_ms:
                return wait, inf
    for chunk, duration in deferred:
        free += duration
        wait = max(wait, free - over - known.next_gradients[chunk])
    return max(wait, behind_ms), link


def _at_once(known: Known, done: Sequence[float]) -> Iterator[tuple[int, float]]:
    """What is issued when the next forward begins, as it goes, where chunks are updated at ``done``: chunk and use."""
    at_once, link = known.uploads[: known.n_at_once], 0.0
    if len(at_once) == 1:
        yield at_once[0][0], at_once[0][2]
        return
    waiting = sorted([(done[chunk], at) for at, (chunk, _, _) in enumerate(at_once)], reverse=True)
    there: list[int] = []  # that are updated
    while waiting or there:
        while waiting and (waiting[-1][0] <= link or not there):
            heappush(there, waiting.pop()[1])
        chunk, _, use = at_once[heappop(there)]
        start = done[chunk]
        link = (start if start > link else link) + known.upload_ms[chunk]
        yield chunk, use
