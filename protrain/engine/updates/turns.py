"""What the host worker takes in turn: the updates of one step, and those of them that are made already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.worker import Job


class Once:
    """Work that whoever comes first does. An error in it is raised in whoever comes."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, unless somebody has."""
        work, self._work = self._work, None
        if work is not None:
            try:
                work()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def begun(self) -> bool:
        """Whether anybody has come; to the worker that does it the work is done then."""
        return self._work is None


class Turn(NamedTuple):
    """The job of a chunk in host memory."""

    chunk: Chunk
    job: Job
    is_made: Callable[[], bool]  # whether an early update has done the work; asked by the host worker
    states: Job | None = None  # in which the states follow an early weight; nothing in the next forward waits for it


class Ahead:
    """Turns that are made, to be taken while the host makes others that come before. For the host worker alone."""

    def __init__(self, link_is_idle: Callable[[], bool]) -> None:
        self._link_is_idle = link_is_idle
        self._jobs: deque[Job] = deque()

    def look(self, turns: list[Turn]) -> None:
        """Find those of ``turns`` that are made."""
        self._jobs = deque(turn.job for turn in turns if turn.is_made())

    def take(self) -> bool:
        """Take as many as the link has time for, where an upload begins with the first whose chunk is wanted.

        Returns whether any are left.
        """
        while self._jobs and (self._jobs[0].done or self._link_is_idle()):  # done: in its own turn
            self._jobs.popleft().run()
        return bool(self._jobs)
