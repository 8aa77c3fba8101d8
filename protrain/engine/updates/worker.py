"""Work on the host beside the main thread: optimizer updates, first in, first out.

A worker thread takes jobs from a queue. Updates are queued in the order in which the next forward needs their chunks.
The kernels that a job calls are multi-threaded and release the GIL, so the main thread goes on launching. A second
worker may begin a job before its turn, to have the device do the update.

[Note: the current GPU] A new thread has GPU 0 as its current one. When the thread leaves a stream, torch makes GPU 0
current again, and CUDA makes a context there. The context takes memory of GPU 0 that no plan counts, and no other
thread runs Python meanwhile (bench/results/h200/NOTES.md). So a worker makes its own GPU the current one before
anything else.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch
from typing_extensions import override

from protrain.engine.streams import span
from protrain.planning.timeline import HOST

_JOIN_S = 10.0  # how long the end of a worker waits for its queued jobs


class Job(Future[None]):
    """A piece of host work. ``result`` waits for it and raises an error in it; ``exception`` waits and returns that."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()
        # Whether the work is over, without an error. It takes no lock, which Ctrl-C could leave held, as ``done`` does.
        self.succeeded = False

    @property
    def begun(self) -> bool:
        """Whether somebody does the work or has done it."""
        return self._work is None

    def run(self, instead: Callable[[], None] | None = None) -> None:
        """Do the work, or ``instead`` of it. A job that was begun before does nothing."""
        with self._lock:
            work, self._work = self._work, None
        if work is None:
            return
        failed = None
        try:
            (instead or work)()
        except BaseException as error:
            failed = error
        del work  # before others go on: it may hold the last reference to a model
        self.succeeded = failed is None
        if failed is None:
            self.set_result(None)
        else:
            self.set_exception(failed)


class _WorkerThread(threading.Thread):
    """The thread of a worker. Its class tells it from other threads, on any of which the collector may end a worker."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: end
        self._device = device
        self.start()
        _threads.add(self)

    @override
    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # see [Note: the current GPU]
        while (job := self.jobs.get()) is not None:
            job.run()
            del job  # an error in it and the frames of that must not live until the next job comes


_threads: weakref.WeakSet[_WorkerThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads: a kernel that returned into a finalised interpreter would abort the process."""
    for thread in _threads:
        thread.jobs.put(None)
    for thread in _threads:
        thread.join()


class HostWorker:
    """One thread that runs jobs in order. When this object is collected, the thread ends after all queued jobs.

    Args:
        threads: the number of threads that a kernel may use.
        device: what the jobs launch copies and kernels on.
        name: of the thread.
    """

    def __init__(self, *, threads: int, device: torch.device, name: str = "protrain-host-worker") -> None:
        self.threads = threads
        self._thread = _WorkerThread(name, device)
        weakref.finalize(self, _end, self._thread).atexit = False  # see _end_all

    def submit(self, work: Callable[[], None], name: str = "") -> Job:
        """Queue ``work`` behind everything that was submitted before. Traces show it under its ``name``, if any."""
        job = self.job(work, name)
        self.queue(job)
        return job

    def job(self, work: Callable[[], None], name: str = "") -> Job:
        """The job that ``submit`` would queue."""
        return Job(functools.partial(_shown, work, name) if name else work)

    def queue(self, job: Job) -> None:
        """Put ``job`` behind everything that was submitted before."""
        self._thread.jobs.put(job)
        if not self._thread.is_alive():  # at the interpreter's exit
            job.run()

    def drain(self) -> None:
        """Block until everything that was submitted is done."""
        self.submit(lambda: None).result()


def _shown(work: Callable[[], None], name: str) -> None:
    with span(HOST, name):
        work()


def _end(thread: _WorkerThread) -> None:
    """End ``thread`` and wait for it, so that memory is free when the collector has freed a model.

    The wait is limited, as the collector may run in a caller that a queued job waits for. Another worker does not wait
    at all, as jobs of ``thread`` may wait for jobs of that worker.
    """
    thread.jobs.put(None)
    if not isinstance(threading.current_thread(), _WorkerThread):
        thread.join(_JOIN_S)
