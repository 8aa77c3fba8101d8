"""AdamW on the chunks of an engine: by the device, by the host worker, and speculatively before step() is called.

[Note: speculative updates] Whether a step clips its gradients, is skipped, or has other hyperparameters is known when
step() is called. By then the host could have updated chunks while backward ran. So where the plan gives a chunk memory
for a second copy of its states, the chunk is updated as soon as its gradient has arrived, from its states into the
copy, as if no gradient were clipped. When step() is called, the host worker checks whether everything was as assumed.
If it was, the copies are exchanged, which costs nothing. If it was not, the update is done from the states, which
nobody has touched. Either way the bits are those of an update at step(). After a step that was not as assumed, the next
step has no speculative updates.

The next forward needs nothing but weights. So the speculative updates of ``Plan.n_weight_only`` chunks compute the
weight only, which takes less memory and time. The other states are updated after all updates that a forward waits for;
such an update is called deferred. The host computes more in all, but not while the step waits for it.

Gradients arrive in the opposite order to that in which the next forward needs their chunks. So a speculative update
that the host has not begun by the end of backward is not done; the chunk is updated in the order of need instead. The
same order holds after backward for updates inside backward (``step_during_backward``), which wait for no step() and
need no copy. While the host updates these chunks, those that were already updated are uploaded whenever the link is
idle, even before their turn.

[Note: streamed updates] Once the norm is known, updates wait in one queue, in the order of need. The host takes the
first. Another thread has the device do those with which the host would be late, judged by when forward needs them and
by the rates that both have had in this run (``protrain.planning.sharing``). It waits for what the host worker would
wait for, has the device stream the states through its memory, and sleeps until they are back. So what follows an update
need not know who did it. A commit of a speculative update costs the host nothing, so the device takes such a chunk only
if its update must be done again. The host may be in the middle of a speculative update when the norm is known. The
device leaves that chunk to the host, too, and takes the host for busy as long as a whole update lasts.

[Note: commit] A step is carried out as a whole or not at all, although Ctrl-C may come between any two lines. Python
raises KeyboardInterrupt in the main thread alone. So the main thread hands all that changes states to another thread at
once, which is the commit, and waits for that thread to launch or queue every update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from protrain.engine.gradients.clipping import LossScale
from protrain.engine.gradients.gradients import Gradients, Settings
from protrain.engine.states.chunks import Chunk, ChunkState, Piece
from protrain.engine.states.groups import Groups
from protrain.engine.streams import Event, Stream, span
from protrain.engine.units import ManagedModel
from protrain.engine.updates.host_updates import NO_SCALE, HostOptimizer, HostUpdate, Rate, Scale, Streamer, Window
from protrain.engine.updates.worker import HostWorker, Job
from protrain.engine.weights.buffers import BufferPool
from protrain.planning.timeline import GPU
from protrain_kernels import AdamScalars


class Updates:
    """All updates of one engine."""

    def __init__(
        self,
        managed: ManagedModel,
        *,
        groups: Groups,
        gradients: Gradients,
        buffers: BufferPool,
        worker: HostWorker,
        streamer: Streamer | None,
        committer: HostWorker,
        inside: bool,
    ) -> None:
        memory = managed.memory
        self.inside = inside  # updates are made inside backward, not by step()
        self.updated_inside: set[int] = set()  # chunks that backward has updated, until step() is called
        self.loss_scale = LossScale() if memory.dtype is torch.float16 else None
        self.streamer = streamer  # None: the plan has no chunks in host memory that the device may update
        self.worker = worker
        self.workers = [worker] if streamer is None else [worker, streamer.worker]  # every thread that updates chunks
        self._committer = committer
        self.host = HostOptimizer(
            threads=worker.threads,
            rate=Rate(0.0) if streamer is None else streamer.host_rate,
            buffers=buffers,
        )
        self._streams = streams = memory.streams
        self._chunks = managed.chunks
        self._groups = groups
        self._gradients = gradients
        self._buffers = buffers
        self._begun: dict[Chunk, HostUpdate] = {}  # updates that this backward has given to the host
        self._window = Window()
        self._assumed_scalars: list[AdamScalars] | None = None  # those of the last backward; None: some are invalid
        self._all_done: list[Job] = []  # for each worker a job after all updates of the last step
        on_device = streams.record_streams(torch.ones(1, dtype=torch.float32, device=memory.device))
        self._last_scale = NO_SCALE  # on the gradients of the last step
        self._published = on_device, memory.arena.take(1, torch.float32), streams.event()

    def drain(self) -> None:
        """Block until nothing that was committed or queued is left to do."""
        for worker in (self._committer, *self.workers):
            worker.drain()

    def wait(self) -> None:
        """Block until every update of the last step is done and visible to the host."""
        self.drain()
        for chunk in self._chunks:
            if chunk.state is ChunkState.UPDATING:
                chunk.wait()

    # -- speculative updates -------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward outside of no_sync()."""
        try:
            self._assumed_scalars = self._groups.all_scalars()
        except ValueError:  # step() raises it if they stay invalid
            self._assumed_scalars = None

    def settings(self) -> Settings:
        """The hyperparameters of this step's updates, and of the last one's, to be compared with other ranks'."""
        return Settings(self._groups.options(), self._last_scale.value)

    def arrived(self, chunks: list[Chunk]) -> None:
        """Begin the updates of ``chunks`` that can begin now, as this backward brings them no more gradients."""
        if self._groups.no_sync:
            return
        for chunk in chunks:
            if self.inside:
                # A missing gradient may come later, or the backward may yet be refused. All ranks call agree().
                if self._gradients.agree(chunk) and not self._buffers.in_use(chunk):
                    self._update_inside(chunk)
            elif chunk.speculative is not None and self._gradients.delivered.issuperset(chunk.parameters):
                self._speculate(chunk)

    def _speculate(self, chunk: Chunk) -> None:
        """Update ``chunk``, which has memory for that and all of whose parameters have a gradient, speculatively.

        Nothing is done in a backward after which another one of the same step is to be expected.
        """
        if not self.host.as_assumed or not self._gradients.is_last or self._assumed_scalars is None:
            return
        pieces = self._pieces(chunk)
        if not pieces:  # the shard is padding
            return
        update = self._begun[chunk] = self._new_update(chunk)
        what = "weight" if chunk.speculates_weight_only else "update"
        speculate = functools.partial(update.speculate, pieces, self._unscaling)
        update.early = self.worker.submit(speculate, f"speculative {what} {chunk.index}")
        chunk.begin(ChunkState.SPECULATED, update.early)

    def forget(self) -> None:
        """Forget the speculative updates, as all gradients are forgotten."""
        if self._begun:
            self._end_window()  # those that have not begun need not begin
            self._begun.clear()

    # -- updates that count --------------------------------------------------------------------------------------------

    @property
    def _unscaling(self) -> float:
        """The factor on gradients that undoes the loss scale: what speculative updates take for that of the step."""
        return 1.0 if self.loss_scale is None else 1.0 / self.loss_scale.used

    def step(self, factor: Tensor | None) -> None:
        """Update every parameter that has a gradient, by ``factor`` of it, 0-d on the device. See [Note: commit]."""
        if self.loss_scale is not None:
            inverse = torch.full((), self._unscaling, dtype=torch.float32, device=self._gradients.device)
            factor = inverse if factor is None else factor * inverse
        assumed = self._unscaling if self._groups.all_scalars() == self._assumed_scalars else None
        self.commit(functools.partial(self._step, factor, assumed, [*map(self._pieces, self._chunks)]))

    def commit(self, work: Callable[[], None]) -> None:
        """Do all of ``work`` even if Ctrl-C comes. See [Note: commit]."""
        self._committer.submit(work).result()

    def _step(self, factor: Tensor | None, assumed_factor: float | None, pieces: list[list[Piece]]) -> None:
        for job in self._all_done:  # usually done long ago: a forward and a backward have come in between
            job.result()
        with self._streams.computing():
            if self.loss_scale is not None:
                self.loss_scale.count_step()
            self._last_scale = scale = NO_SCALE if factor is None else self._publish(factor)
            self._gradients.reduction.send_all()
            norm = self._end_window()
            updates = [
                self._update(*each, scale, self._streams.compute) for each in zip(self._chunks, pieces, strict=True)
            ]
            self._queue([*filter(None, updates)], norm, scale, assumed_factor)

    def _publish(self, factor: Tensor) -> Scale:
        """``factor``, 0-d on the device, for updates by the device and by the host."""
        streams, (on_device, on_host, ready) = self._streams, self._published
        streams.compute.wait_event(ready)  # the copy of the step before may still read it
        on_device.copy_(factor.reshape(1))  # ``factor`` could be freed before the copy to the host has run
        computed = streams.event()
        streams.compute.record_event(computed)
        streams.offload(on_host, on_device, after=computed, done=ready)
        return Scale(on_device, on_host, ready)

    def _update_inside(self, chunk: Chunk) -> None:
        """Update ``chunk`` inside backward: on the device at once, or by the host worker."""
        self.updated_inside.add(chunk.index)
        self._gradients.reduction.send(chunk)
        # Several ranks update it where its gradient was folded, so that compute does not wait.
        stream = self._streams.reduce if chunk.ranks.several else self._streams.compute
        update = self._update(chunk, self._pieces(chunk), NO_SCALE, stream)
        if update is not None:
            self.worker.submit(update.run_in_backward)
            update.begin()
            self._begun[chunk] = update
        for index in chunk.parameters:  # the gradient is used up, even if backward fails and zero_grad is never called
            self._gradients.present[index] = False
        self._gradients.pools.release(chunk)

    def end_backward(self) -> None:
        """Make the updates inside backward that are left, and queue them in the order in which forward needs them."""
        for chunk in self._chunks:
            if chunk.index not in self.updated_inside and self._gradients.has_gradients(chunk):
                self._update_inside(chunk)
        updates = sorted(self._begun.values(), key=lambda update: update.chunk.index)
        self.commit(lambda: self._queue(updates, self._end_window(), NO_SCALE, 1.0))
        self._begun.clear()

    def _end_window(self) -> Event:
        """Let updates in the order of need begin when backward ends on the device. Returns the event of that."""
        streams = self._streams
        end = streams.event()
        streams.compute.record_event(end)
        self._window.end = end  # assigned after it was recorded, as an event that was never recorded counts as reached
        self._window = Window()
        return end

    def _update(self, chunk: Chunk, pieces: list[Piece], scale: Scale, stream: Stream) -> HostUpdate | None:
        """Update ``chunk`` on the device now, on ``stream``, or return the update to queue. None: nothing else to do.

        It counts a step for each parameter of ``chunk`` that has a gradient.
        """
        for index in chunk.parameters:
            self._gradients.members[index].steps += self._gradients.present[index]
        if self._gradients.has_gradients(chunk):
            self._buffers.invalidate(chunk)  # also if another rank's shard changes and this one's has no parameter
        if not pieces:
            return None
        if not chunk.persistent:
            return self._offloaded_update(chunk, pieces, scale)
        with span(GPU, f"update {chunk.index}"), self._streams.running(stream, after=chunk.updated, done=chunk.updated):
            chunk.adam(pieces, chunk.gradient, scale.on_device, threads=self.worker.threads)
        return None

    def _new_update(self, chunk: Chunk) -> HostUpdate:
        """An update of ``chunk``, which is in host memory, before anything is done or asked for."""
        return HostUpdate(chunk=chunk, gradient=chunk.gradient, window=self._window, host=self.host)

    def _offloaded_update(self, chunk: Chunk, pieces: list[Piece], scale: Scale) -> HostUpdate:
        """The pending update of a chunk in host memory."""
        update = self._begun.pop(chunk, None)
        if update is None or chunk.state is not ChunkState.SPECULATED:  # another gradient has come since it was begun
            update = self._new_update(chunk)
        elif chunk.speculates_weight_only:
            update.deferred = self.worker.job(update.catch_up, f"deferred update {chunk.index}")
        update.pieces, update.scale = pieces, scale
        update.job = self.worker.job(update.run, f"update {chunk.index}")
        return update

    def _queue(self, updates: Sequence[HostUpdate], norm: Event, scale: Scale, assumed_factor: float | None) -> None:
        """Queue ``updates``, which come in the order in which the next forward needs their chunks.

        ``norm`` is where the norm is known on the device. The rest is for ``HostOptimizer.begin_step``.
        """
        self.worker.submit(functools.partial(self.host.begin_step, updates, scale, assumed_factor))
        for update in updates:
            update.begin()
            self.worker.queue(update.job)
        if self.streamer is not None:
            self.streamer.share(updates, norm)
        for update in reversed(updates):  # in the order in which the next backward needs the memory of their gradients
            if update.deferred is not None:
                self.worker.queue(update.deferred)
        # No job of an update tells that all are done, as each may have run ahead of its turn.
        self._all_done = [each.submit(lambda: None) for each in self.workers]

    def _pieces(self, chunk: Chunk) -> list[Piece]:
        """Runs of neighbouring parameters that have a gradient and share hyperparameters and the number of steps."""
        runs: list[tuple[int, int, int, int]] = []
        for index in chunk.parameters:
            member = self._gradients.members[index]
            start, stop = member.shard_slice.start, member.shard_slice.stop
            if member.group < 0 or start == stop or not self._gradients.present[index]:
                continue
            key = (member.group, member.steps + 1)
            if runs and runs[-1][1] == start and runs[-1][2:] == key:
                runs[-1] = (runs[-1][0], stop, *key)
            else:
                runs.append((start, stop, *key))
        return [(slice(start, stop), self._groups.scalars(group, step)) for start, stop, group, step in runs]
