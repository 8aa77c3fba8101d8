"""Engines whose copies and host updates come at the worst moment allowed; see late_streams.

``LateWorker`` stands in for the host worker: updates run as late, as early, or as arbitrarily as their order allows.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from protrain.engine.updates.worker import HostWorker, Job
from protrain.engine.weights.buffers import BufferPool
from protrain.optim.optimizer import ProTrainOptimizer
from protrain_kernels import flatten
from tests.engine.late_streams import LateStreams


class _LateJob(Job):
    def __init__(self, work: Callable[[], None], worker: LateWorker) -> None:
        super().__init__(work)
        self._worker = worker

    @override
    def result(self, timeout: float | None = None) -> None:
        self._worker.run_until(self)
        super().result(timeout)

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._worker.run_until(self)
        return super().exception(timeout)


class LateWorker(HostWorker):
    """Host work in order, on the calling thread: when somebody waits ("late"), at once ("early"), or by chance."""

    def __init__(self, *, threads: int, schedule: str, choice: random.Random) -> None:
        self.threads = threads
        self.schedule = schedule
        self.choice = choice
        self.pool: Callable[[], BufferPool | None] = lambda: None  # whose lock the thread could be waiting for
        self._jobs: deque[Job] = deque()
        self._busy = False
        weakref.finalize(self, _finish, self._jobs)  # as the thread does

    @override
    def job(self, work: Callable[[], None], name: str = "") -> Job:
        return _LateJob(work, self)

    @override
    def queue(self, job: Job) -> Job:
        self._jobs.append(job)
        if self.schedule == "early":
            self._run_while(lambda: bool(self._jobs))
        self.come_in()
        return job

    def run_until(self, job: Job) -> None:
        """Do everything up to ``job``."""
        self._run_while(lambda: not job.done())

    def come_in(self) -> None:
        """The thread gets on by chance, wherever the main thread is."""
        pool = self.pool()
        if self.schedule == "random" and pool is not None and not pool._lock.locked() and not self._busy:
            for _ in range(self.choice.choice((0, 0, 0, 1, 1, 2, 5))):
                if self._jobs:
                    self._next()

    def _run_while(self, more: Callable[[], bool]) -> None:
        while more():
            self._next()

    def _next(self) -> None:
        self._busy = True
        try:
            self._jobs.popleft().run()
        finally:
            self._busy = False


def _finish(jobs: deque[Job]) -> None:
    while jobs:
        jobs.popleft().run()


def _come_in(found: Iterable[LateWorker | None]) -> None:
    workers = [worker for worker in found if worker is not None]
    if not any(worker._busy for worker in workers):  # one may wait for the other, which cannot get on inside of it
        for worker in workers:
            worker.come_in()


@dataclass
class Lateness:
    """Every engine built inside has late streams and a worker of this kind."""

    schedule: str = "late"
    seed: int | None = None

    def __post_init__(self) -> None:
        self.streams: list[LateStreams] = []

    def __str__(self) -> str:
        return self.schedule if self.seed is None else f"{self.schedule}-{self.seed}"

    @contextmanager
    def applied(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lateness]:
        """Replace what the engine is built with; faults that no test saw are raised at the end."""
        choice = random.Random(self.seed)

        def make_streams(_: torch.device) -> LateStreams:
            self.streams.append(LateStreams(choice if self.seed is not None else None))
            return self.streams[-1]

        def make_worker(*, threads: int, device: torch.device, name: str = "") -> LateWorker:
            return LateWorker(threads=threads, schedule=self.schedule, choice=choice)

        begin = ProTrainOptimizer.attach

        def begun(optimizer: ProTrainOptimizer, engine: Any, **options: Any) -> None:
            begin(optimizer, engine, **options)
            workers = [weakref.ref(worker) for worker in engine.updates.workers]
            for worker in engine.updates.workers:
                worker.pool = weakref.ref(engine.buffers)
            engine.streams.between = lambda: _come_in(worker() for worker in workers)

        def flattened(gradients: Any, target: Tensor, *args: Any, **options: Any) -> None:
            for streams in self.streams:  # no operator of torch
                streams.used(target)
            flatten(gradients, target, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr("protrain.engine.build.streams_for", make_streams)
            patch.setattr("protrain.engine.build.HostWorker", make_worker)
            patch.setattr(ProTrainOptimizer, "attach", begun)
            patch.setattr("protrain.engine.gradients.reduction.flatten", flattened)
            yield self
        faults = [fault for streams in self.streams for fault in streams.faults]
        assert not faults, faults
        assert all(sum(streams.issued[way] for streams in self.streams) for way in (0, 1)), "nothing moved"
