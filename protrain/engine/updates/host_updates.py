"""Updates of chunks in host memory: what a step queues for each chunk, and how the host or the device does it.

The device does some of them, with which the host would be late: see [Note: streamed updates] in updates.py.

Nothing here refers to the engine, as a model that is dropped must not wait for updates.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from protrain.engine.states.chunks import Chunk, ChunkState, Piece, State
from protrain.engine.streams import Event, Streams, span
from protrain.engine.updates.worker import HostWorker, Job
from protrain.engine.weights.buffers import BufferPool
from protrain.planning.sharing import Sharing, Waiting, next_for_gpu
from protrain.planning.timeline import STREAM

_NEWEST_SHARE = 0.2  # what the newest update counts in the rate: about the last five decide it
_FORGOTTEN_SHARE = 0.05  # how far the rate goes back to the predicted one in a step without an update: half in 14 steps


class Rate:
    """A rate in 1e9 elements a second: an average in which the last updates count most.

    Args:
        gparams: the predicted rate, which holds until the first update.
    """

    def __init__(self, gparams: float) -> None:
        self.gparams = self._predicted = gparams
        self._elements, self._seconds = 0, 0.0  # of all updates
        self._began = 0.0  # when the update that is timed would have begun if nothing else had been done meanwhile

    @contextmanager
    def timing(self, pieces: list[Piece]) -> Iterator[None]:
        """Time the body, which updates ``pieces``."""
        self._began = time.perf_counter()
        yield
        seconds = time.perf_counter() - self._began
        elements = sum(part.stop - part.start for part, _ in pieces)
        measured = elements / max(seconds, 1e-9) / 1e9
        self.gparams += (measured - self.gparams) * (_NEWEST_SHARE if self._elements else 1.0)
        self._elements += elements
        self._seconds += seconds

    def leave_out(self, work: Callable[[], None]) -> None:
        """Do ``work`` in the middle of the update that is timed, of which it is no part."""
        before, begin = self._began, time.perf_counter()
        work()
        self._began = before + time.perf_counter() - begin

    def forget(self) -> None:
        """Let the rate turn towards the predicted one, as no update was made in this step.

        Whoever decides by the rate that an update is not worth it would otherwise never see that it has changed.
        """
        self.gparams += (self._predicted - self.gparams) * _FORGOTTEN_SHARE

    def mean_gparams(self) -> float:
        """1e9 elements a second over all updates; 0 if there are none."""
        return self._elements / max(self._seconds, 1e-9) / 1e9

    def milliseconds(self, elements: int) -> float:
        """How long an update of ``elements`` takes."""
        return elements / max(self.gparams, 1e-9) / 1e6


class Scale(NamedTuple):
    """The factor on gradients, for clipping and loss scaling: one fp32 number. Without tensors it is 1."""

    on_device: Tensor | None
    on_host: Tensor | None
    ready: Event  # on_host has its value

    @property
    def value(self) -> float:
        """The number, once it is on the host."""
        self.ready.synchronize()
        return 1.0 if self.on_host is None else self.on_host.item()


NO_SCALE = Scale(None, None, Event())


class UpdateState(State):
    """What has become of an update of one chunk. See [Note: states of an update]."""

    PENDING = "pending", "speculated", "updated"
    SPECULATED = "speculated", "committed", "redone"
    COMMITTED = "committed", "caught up"
    UPDATED = ("updated",)
    REDONE = ("redone",)
    CAUGHT_UP = ("caught up",)


class HostOptimizer:
    """AdamW on the host, for the host worker. It also counts how the updates by host and device have turned out.

    Args:
        threads: number of host threads.
        rate: of the updates that compute all states.
        buffers: the weights that are updated are uploaded to them.
    """

    def __init__(self, *, threads: int, rate: Rate, buffers: BufferPool) -> None:
        self.threads = threads
        self.rate = rate
        self.as_assumed = True  # whether the last step was as its speculative updates had assumed
        self.counts = Counter[UpdateState]()  # how many updates have come to each state
        self.buffers = buffers
        self._commits: deque[Job] = deque()
        self.counting = threading.Lock()  # the thread of the streamer counts, too

    def update(self, chunk: Chunk, pieces: list[Piece], gradient: Tensor, scale: Scale) -> None:
        """Update ``pieces`` of ``chunk`` by ``gradient``, all in host memory, and run commits in the middle of that."""
        between = functools.partial(self.rate.leave_out, self.run_commits)
        with self.rate.timing(pieces):
            chunk.adam(pieces, gradient, scale.on_host, threads=self.threads, between=between)

    def begin_step(self, updates: Iterable[HostUpdate], scale: Scale, assumed_factor: float | None) -> None:
        """Take the ``updates`` of the step. Those that were already done speculatively upload first.

        ``assumed_factor`` on the gradients is what they had assumed; None: they had assumed other hyperparameters.
        """
        self.as_assumed = scale.value == assumed_factor
        self._commits = deque(update.job for update in updates if update.can_commit())

    def run_commits(self) -> None:
        """Run commits ahead of their turn, until one of them starts an upload."""
        commits = self._commits
        while commits and (commits[0].done() or self.buffers.link_is_idle()):  # one that is done has had its turn
            commits.popleft().run()


@dataclass(eq=False)
class Window:
    """The time in which the host may begin updates in the order in which gradients arrive."""

    end: Event | None = None  # the end of the last backward on the device; None until step() or the end of backward

    def is_closed(self) -> bool:
        """Whether updates in the order of need may begin.

        The window stays open while its backward runs. So a job that backward has queued does its work, and the host
        memory of its gradient is free when the job is done.
        """
        return self.end is not None and self.end.query()


@dataclass(eq=False, kw_only=True)
class HostUpdate:
    """The update of ``chunk`` in one step, by the host or by the device.

    [Note: states of an update] An update goes through these states and no others. Whoever does the work changes them:

        PENDING     nothing is done
        SPECULATED  the result is in the chunk's second copy. The step has not asked for it, or was not looked at yet
        COMMITTED   the step has asked for what was done, and the copies are exchanged
        UPDATED     it was done at the step's request
        REDONE      the same, as the step has asked for something else than was done speculatively
        CAUGHT_UP   the copy had the weight only, and the other states have followed
    """

    chunk: Chunk
    gradient: Tensor  # in host memory
    window: Window  # of the backward that brings the gradient
    host: HostOptimizer
    state: UpdateState = UpdateState.PENDING
    early: Job | None = None  # in which the host begins it while backward runs
    # The pieces and the factor on the gradient with which it was done speculatively.
    assumed: tuple[list[Piece], float] | None = None
    # What the step asks for.
    pieces: list[Piece] = field(init=False)
    scale: Scale = field(init=False)  # the factor on the gradient
    job: Job = field(init=False)  # after which the weight is that of the step
    deferred: Job | None = None  # updates the states after a commit of the weight alone; no forward waits for it

    def run_in_backward(self) -> None:
        """Do the update inside backward, if there is still time for it."""
        if not self.window.is_closed():
            self.job.run()

    def speculate(self, pieces: list[Piece], factor: float) -> None:
        """Do the update speculatively, if there is still time for it.

        Args:
            pieces: as they are in backward.
            factor: on the gradient, if nothing is clipped.
        """
        if self.window.is_closed():
            return
        chunk = self.chunk
        _wait_for_gradient(chunk, NO_SCALE)
        self.assumed = pieces, factor
        scale = None if factor == 1.0 else torch.tensor([factor], dtype=torch.float32, device="cpu")
        with nullcontext() if chunk.speculates_weight_only else self.host.rate.timing(pieces):
            chunk.adam_speculatively(pieces, self.gradient, scale, threads=self.host.threads)
        self._go_to(UpdateState.SPECULATED)

    def begin(self) -> None:
        """Begin a job, for which fetches of the chunk wait from now on."""
        self.chunk.begin(ChunkState.UPDATING, self.job, then=self.deferred)

    def host_job(self) -> Job | None:
        """The job in which the host works on this update now, be it speculatively; None: it does not."""
        return next((job for job in (self.early, self.job) if job is not None and job.begun and not job.done()), None)

    def can_commit(self) -> bool:
        """Whether the work is done already. It waits for the factor on the gradients."""
        if self.state is not UpdateState.SPECULATED:
            return False
        return self.assumed == (self.pieces, self.scale.value)

    def run(self) -> None:
        """Commit the speculative update, or update the chunk on the host."""
        if not self.can_commit():
            self.run_with(self.host.update)
            return
        self.chunk.commit()
        self._end(UpdateState.COMMITTED)

    def run_with(self, update: Callable[[Chunk, list[Piece], Tensor, Scale], None]) -> None:
        """Call ``update`` when what it reads is there."""
        _wait_for_gradient(self.chunk, self.scale)
        update(self.chunk, self.pieces, self.gradient, self.scale)
        self._end(UpdateState.REDONE if self.state is UpdateState.SPECULATED else UpdateState.UPDATED)

    def catch_up(self) -> None:
        """Update all states if the step has committed the speculative weight."""
        if self.state is UpdateState.COMMITTED:
            self.host.update(self.chunk, self.pieces, self.gradient, self.scale)
            self.chunk.current_weight = self.chunk.weight  # from now on the two weights have the same bits
            self._go_to(UpdateState.CAUGHT_UP)

    def _end(self, new: UpdateState) -> None:
        """End the update: the weight is that of the step, and is uploaded if a buffer waits for it."""
        self._go_to(new)
        self.host.buffers.issue_upload(self.chunk)

    def _go_to(self, new: UpdateState) -> None:
        self.state = self.state.become(new)
        with self.host.counting:
            self.host.counts[new] += 1


def _wait_for_gradient(chunk: Chunk, scale: Scale) -> None:
    """Block until ``chunk`` in host memory may be updated.

    Args:
        chunk: its gradient must have arrived, and no upload may read its weight any more. A forward after the last
            gradient, such as an evaluation, may still do so.
        scale: the factor on the gradient, which must have arrived, too.
    """
    scale.ready.synchronize()
    chunk.offloaded.synchronize()
    chunk.uploaded.synchronize()


class Streamer:
    """Has the device update chunks in host memory, with which the host would be late, on a thread of its own.

    Args:
        streams: of the engine. On the CPU the host's kernel does the work, on the thread.
        sharing: when the forward needs each chunk, and the predicted rates.
        worker: the thread.
    """

    def __init__(self, streams: Streams, sharing: Sharing, worker: HostWorker) -> None:
        self.worker = worker
        self.rate = Rate(sharing.device_gparams)
        self.host_rate = Rate(sharing.host_gparams)
        self.updates = 0
        self._sharing = sharing
        self._streams = streams
        self._staging = streams.adam_staging(sharing.staging_bytes)
        self._done = streams.event()

    def update(self, chunk: Chunk, pieces: list[Piece], gradient: Tensor, scale: Scale) -> None:
        """Update ``pieces`` of ``chunk``, and wait until the host sees the result.

        Args:
            chunk: a chunk in host memory whose states are all pinned.
            pieces: runs of elements with their hyperparameters.
            gradient: the gradient in host memory.
            scale: factor on the gradient.
        """
        # The first one also compiles the kernel, and would say for good that the device is slow.
        timed = self.rate.timing(pieces) if self.updates else nullcontext()
        with timed, span(STREAM, f"update {chunk.index}"):
            with self._streams.streaming(self._done):
                chunk.adam_streamed(pieces, gradient, scale.on_device, self._staging)
            self._done.synchronize()
        self.updates += 1

    def share(self, updates: Sequence[HostUpdate], norm: Event) -> None:
        """Have the device do those of ``updates`` with which the host would be late.

        Args:
            updates: in the order in which the host does them.
            norm: where the norm is known, from which on forward runs.
        """
        if updates:
            self.worker.submit(functools.partial(self._share, updates, norm))

    def _share(self, updates: Sequence[HostUpdate], norm: Event) -> None:
        norm.synchronize()
        begin, before = time.perf_counter(), self.updates
        while True:
            at_work = {update: job for update in updates if (job := update.host_job()) is not None}
            left = [update for update in updates if not update.job.begun and update not in at_work]
            if all(update.can_commit() for update in left):
                break
            now_ms = (time.perf_counter() - begin) * 1e3
            free_ms = now_ms + sum(map(self._host_ms, at_work))
            index = next_for_gpu([self._waiting(update) for update in left], now_ms, free_ms, self._sharing.host_kept)
            if index is None:
                # When that is done the host's rate and what is left are known anew.
                next(iter(at_work.values()), left[0].job).exception()
                continue
            update = left[index]
            update.job.run(functools.partial(update.run_with, self.update))
        if self.updates == before:
            self.rate.forget()

    def _waiting(self, update: HostUpdate) -> Waiting:
        device_ms = inf if update.can_commit() else self.rate.milliseconds(update.chunk.shard_elements)
        sharing, at = self._sharing, update.chunk.index
        by_chunk = sharing.needed_ms[at], sharing.upload_ms[at], sharing.states_ms[at]
        return Waiting(self._host_ms(update), device_ms, *by_chunk)

    def _host_ms(self, update: HostUpdate) -> float:
        return 0.0 if update.can_commit() else self.host_rate.milliseconds(update.chunk.shard_elements)
