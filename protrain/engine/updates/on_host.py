"""How the host updates a chunk, and a tally of how such updates turned out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from protrain.engine.states.chunks import Chunk, Piece
from protrain.engine.updates.ordering import CommitsFirst
from protrain.engine.updates.rates import Rate
from protrain.engine.updates.streamer import Scale
from protrain.engine.updates.worker import Job


@dataclass
class Tally:
    """How speculative updates turned out, and how fast updates were. The host worker writes it."""

    host_rate: Rate = field(default_factory=lambda: Rate(0.0))  # of updates on the host that compute all states
    as_assumed: bool = True  # the last step was as its speculative updates had assumed
    committed: int = 0
    redone: int = 0

    @contextmanager
    def timing(self, pieces: list[Piece]) -> Iterator[Callable[[Callable[[], bool]], bool]]:
        """Time the body, which updates all states of ``pieces`` on the host.

        Yields a function that calls another one and leaves that call out of the time.
        """
        untimed_s = 0.0

        def untimed(work: Callable[[], bool]) -> bool:
            nonlocal untimed_s
            begin = time.perf_counter()
            answer = work()
            untimed_s += time.perf_counter() - begin
            return answer

        begin = time.perf_counter()
        yield untimed
        self.host_rate.add(pieces, time.perf_counter() - begin - untimed_s)


def wait_for_gradient(chunk: Chunk, scale: Scale | None, summing: Job | None) -> None:
    """Block until ``chunk`` in host memory may be updated.

    Args:
        chunk: its gradient must have arrived, and no upload may read its weight any more. A forward after the last
            gradient, such as an evaluation, may still do so.
        scale: the factor on the gradient, which must have arrived, too.
        summing: the job that adds to the gradient. An error in it is raised here.
    """
    if scale is not None:
        scale.ready.wait()
    if summing is not None:
        summing.wait()
    chunk.offloaded.wait()
    chunk.uploaded.wait()


def update_on_host(
    chunk: Chunk,
    pieces: list[Piece],
    gradient: Tensor,
    scale: Scale | None,
    *,
    threads: int,
    commits: CommitsFirst,
    tally: Tally,
) -> None:
    """Update ``pieces`` of ``chunk`` on the calling thread.

    Args:
        chunk: in host memory.
        pieces: runs of elements with their hyperparameters.
        gradient: the gradient in host memory.
        scale: factor on the gradient.
        threads: number of host threads.
        commits: jobs that may run in the middle of this update.
        tally: counts the time of the update.
    """
    on_host = None if scale is None else scale.on_host
    with tally.timing(pieces) as untimed:
        chunk.step(pieces, gradient, on_host, threads=threads, between=functools.partial(untimed, commits.run))
