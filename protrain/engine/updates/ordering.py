"""The order in which the host worker updates chunks, and what may be done ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.worker import Job


class ChunkUpdate(NamedTuple):
    """The update of a chunk in host memory, as one step queues it."""

    chunk: Chunk
    job: Job
    can_commit: Callable[[], bool]  # whether the work is done already; it waits for the factor on the gradients
    deferred: Job | None = None  # updates the states after a commit of the weight alone; no forward waits for it
    streamed: Callable[[], None] | None = None  # has the device do the update; None: there is no staging


class CommitsFirst:
    """Runs jobs whose work is done already ahead of their turn, so that their chunks are uploaded early.

    The host worker alone uses it, in the middle of other updates.
    """

    def __init__(self, link_is_idle: Callable[[], bool]) -> None:
        self._link_is_idle = link_is_idle
        self._jobs: deque[Job] = deque()

    def find(self, updates: list[ChunkUpdate]) -> None:
        """Collect the updates that were already done speculatively, so that they upload first."""
        self._jobs = deque(update.job for update in updates if update.can_commit())

    def run(self) -> bool:
        """Run jobs until one of them starts an upload. Returns whether any are left."""
        while self._jobs and (self._jobs[0].done or self._link_is_idle()):  # one that is done has had its turn
            self._jobs.popleft().run()
        return bool(self._jobs)
