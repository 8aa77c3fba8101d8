"""Chunk buffers: the device memory in which units find the weights of their chunks.

A resident chunk has a buffer of its own, which is its weight, and which it never gives up. All other chunks pass
through a pool of ``plan.n_buffer`` buffers for usual chunks, and others for large chunks. With one rank the persistent
chunks are resident. With several ranks no chunk is, as a rank has one shard of each.

[Note: residency] The content of a buffer in the pool goes through these states and no others:

    EMPTY -> ASSIGNED     the main thread has chosen the buffer for a chunk
    ASSIGNED -> UPLOADED  the upload is issued and its event recorded, by whoever finishes the update of the chunk
    UPLOADED -> WHOLE     the main thread has made the whole weight of what was uploaded, and compute may use it
    WHOLE -> EMPTY        the content is evicted or out of date; no unit uses it
    ASSIGNED/UPLOADED -> EMPTY  the content is given up before use; the next upload follows on the same stream

The buffer of a resident chunk is RESIDENT. No transition leads to that state or out of it.

Only the main thread assigns and evicts, in the order of the schedule, whatever the timing: other threads do no more
than fill a buffer that is assigned already, at the end of the update of its chunk. (The thread that commits a step
evicts what it updates, and the main thread waits for it.) With several ranks an upload is the rank's own shard. Between
UPLOADED and WHOLE the main thread issues the gather of all shards, which all ranks must do in one order. It does so one
visit of the schedule ahead of the use (``BufferPool.make_whole``). On one GPU the upload is the whole weight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Chunk, Member, State
from protrain.engine.streams import Event, Streams, span
from protrain.engine.weights.views import storage_address
from protrain.planning.schedule import EMPTY, Schedule, claim
from protrain.planning.timeline import GATHER, UP


class Residency(State):
    """The state of a buffer's content. See [Note: residency]."""

    EMPTY = "empty", "assigned"
    ASSIGNED = "assigned", "uploaded", "empty"
    UPLOADED = "uploaded", "whole", "empty"
    WHOLE = "whole", "empty"
    RESIDENT = ("resident",)


class Buffer:
    """One buffer: its memory, the chunk in it, and the events that order its uses.

    Args:
        memory: 1-d, from the start of its storage, which holds the weights of no other buffer.
        streams: make the events.
        resident: the chunk whose weight ``memory`` is. None: the buffer is one of the pool.
    """

    def __init__(self, memory: Tensor, streams: Streams, *, resident: Chunk | None = None) -> None:
        self.memory = memory
        self.chunk = resident
        self.users = 0  # units that use the content now
        self.uploaded: Event = streams.event()  # the upload is done
        self.gathered: Event = streams.event()  # the gather is done
        self.free: Event = streams.event()  # the last kernel that reads the content is done
        # Tensors on the memory that may outlive its use: those that autograd saves through the engine. They are counted
        # to find others. The number never decreases: when known views die, some unknown ones may go unnoticed.
        self.known_views = 0
        self._unknown_before = 0  # other tensors on the memory when units began to use it
        self._storage = memory.untyped_storage()
        self._views: dict[int, Tensor] = {}  # by parameter
        self.state = Residency.EMPTY if resident is None else Residency.RESIDENT

    def become(self, new: Residency) -> None:
        """The content is ``new`` from now on."""
        self.state = self.state.become(new)

    def view(self, member: Member) -> Tensor:
        """The place of ``member`` in the memory, if its chunk is the content. It is made once, as memory stays."""
        view = self._views.get(member.index)
        if view is None:
            with torch._C._DisableTorchDispatch(), torch._C._DisableFuncTorch():  # modes of the caller end before it
                view = self._views[member.index] = member.view(self.memory)
            self.known_views += 1
        return view

    def begin_use(self) -> None:
        """Units begin to use the content."""
        self._unknown_before = self._unknown_views()

    def has_leaked_view(self) -> bool:
        """Whether more views are alive than when units began to use the content, beside those that are known."""
        return self._unknown_views() > self._unknown_before

    def _unknown_views(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count - self.known_views


class BufferPool:
    """Fetches chunks into buffers ahead of their use, and keeps them there while units use them.

    Args:
        memory: where buffers are allocated.
        resident: chunks whose weights are buffers of their own.
        n_buffers: the number of buffers for other usual chunks, and for large ones.
        buffer_elements: the size of a buffer for usual chunks, and for large ones.
    """

    def __init__(
        self,
        memory: EngineMemory,
        *,
        resident: Iterable[Chunk],
        n_buffers: tuple[int, int],
        buffer_elements: tuple[int, int],
    ) -> None:
        self.streams = streams = memory.streams
        self.poison = memory.poison
        self._ranks = memory.ranks
        start = float("nan") if memory.poison else 0.0

        def allocated(elements: int) -> Tensor:
            # Each buffer is an allocation of its own, as saved views are recognised by the address of their storage.
            return streams.record_streams(torch.full((elements,), start, dtype=memory.dtype, device=memory.device))

        usual, large = (
            [Buffer(allocated(elements), streams) for _ in range(n_buffer)]
            for n_buffer, elements in zip(n_buffers, buffer_elements, strict=True)
        )
        self.buffers = [*usual, *large]  # that chunks take turns in
        self._usual, self._large = usual, large
        for buffer in self.buffers:
            streams.compute.record_event(buffer.free)
        self._by_chunk = {chunk.index: Buffer(chunk.weight, streams, resident=chunk) for chunk in resident}
        self.by_address = {storage_address(each.memory): each for each in (*self._by_chunk.values(), *self.buffers)}
        self._lock = threading.Lock()  # the threads that update chunks issue uploads too
        self._last_upload: Event = streams.event()  # the last one that was issued is done
        self.fetches = 0  # uploads that were issued
        self.uploaded_bytes = 0  # by those from host memory

    def acquire(self, chunks: list[Chunk], schedule: Schedule) -> None:
        """Have the weights of ``chunks``, all that a unit needs, on the device until ``release`` of each.

        This blocks for their own updates only.
        """
        # Chunks that are in a buffer already come first, so that the others cannot evict them.
        for chunk in sorted(chunks, key=lambda chunk: chunk.index not in self._by_chunk):
            buffer = self._by_chunk.get(chunk.index) or self._assign(chunk, schedule, needed_in=0)
            if buffer is None:
                names = ", ".join(list(chunk.parameters.values())[:3])
                raise MisuseError(
                    f"forward uses {names}, but the modules around it use all chunk buffers, which they did not in the "
                    "step that was profiled: pass an example_batch with which the model runs as it will be trained"
                )
            self._make_whole(buffer, chunk)
            if not buffer.users:
                self.streams.compute.wait_event(buffer.gathered)
                buffer.begin_use()
            buffer.users += 1

    def used(self, chunk: Chunk) -> Buffer:
        """The buffer in which a unit uses ``chunk`` now."""
        buffer = self._by_chunk[chunk.index]
        assert buffer.users > 0
        assert buffer.state in (Residency.WHOLE, Residency.RESIDENT)
        return buffer

    def in_use(self, chunk: Chunk) -> bool:
        """Whether any unit uses ``chunk``."""
        buffer = self._by_chunk.get(chunk.index)
        return buffer is not None and buffer.users > 0

    def release(self, chunk: Chunk) -> None:
        """End one ``acquire`` of ``chunk``."""
        buffer = self._by_chunk[chunk.index]
        assert buffer.users > 0
        buffer.users -= 1
        if not buffer.users and not chunk.resident:  # nothing is ever uploaded over a resident weight
            self.streams.compute.record_event(buffer.free)

    def reset(self) -> None:
        """End every ``acquire``, and empty the buffers that chunks take turns in. No copy or kernel is under way."""
        for buffer in self.by_address.values():
            buffer.users = 0
            if buffer.state not in (Residency.EMPTY, Residency.RESIDENT):
                self._evict(buffer)
        self._by_chunk = {index: each for index, each in self._by_chunk.items() if each.state is Residency.RESIDENT}

    def has_leaked_view(self, chunk: Chunk) -> bool:
        """Whether a view of ``chunk`` is alive though no unit uses it: the view will soon show another chunk."""
        buffer = self._by_chunk.get(chunk.index)
        return buffer is not None and buffer.users == 0 and buffer.has_leaked_view()

    def prefetch(self, chunks: list[Chunk], schedule: Schedule) -> None:
        """Fetch chunks in the order in which they are needed, while a buffer is free or its content is needed later."""
        for index in schedule.upcoming():
            chunk = chunks[index]
            if index in self._by_chunk:
                continue
            if self._assign(chunk, schedule, needed_in=schedule.next_use(index)) is None:
                return

    def make_whole(self, chunks: Iterable[Chunk]) -> None:
        """Gather the weights of ``chunks`` ahead of their use, as far as they have buffers."""
        for chunk in chunks:
            buffer = self._by_chunk.get(chunk.index)
            if buffer is not None:
                self._make_whole(buffer, chunk)

    def invalidate(self, chunk: Chunk) -> None:
        """Evict ``chunk``, whose weight is about to change, unless its buffer is the weight itself."""
        buffer = self._by_chunk.get(chunk.index)
        if buffer is not None and not chunk.resident:
            assert buffer.users == 0, "a chunk is updated while a unit uses it"
            self._evict(buffer)

    def issue_upload(self, chunk: Chunk) -> None:
        """Issue the upload of ``chunk``, whose weight is that of the last step, if a buffer is assigned to it."""
        with self._lock:
            buffer = self._by_chunk.get(chunk.index)
            if buffer is not None and buffer.state is Residency.ASSIGNED:
                self._upload(buffer, chunk)
                buffer.become(Residency.UPLOADED)

    def link_is_idle(self) -> bool:
        """Whether all uploads that were issued are done."""
        return self._last_upload.query()

    def _assign(self, chunk: Chunk, schedule: Schedule, *, needed_in: int) -> Buffer | None:
        """Assign a buffer to ``chunk``, and evict what is in it: see ``claim``. None if there is no buffer for it."""
        unused = {  # by content; of empty buffers it is the first
            EMPTY if buffer.chunk is None or buffer.state is Residency.EMPTY else buffer.chunk.index: buffer
            for buffer in reversed(self._large if chunk.large else self._usual)
            if not buffer.users
        }
        claimed = claim(unused, schedule.next_use, needed_in)
        if claimed is None:
            return None
        found = unused[claimed]
        if found.state is not Residency.EMPTY:
            self._evict(found)
        found.chunk = chunk
        found.become(Residency.ASSIGNED)
        self._by_chunk[chunk.index] = found
        if chunk.update is None or chunk.update.succeeded:  # the weight in host memory is that of the last step
            self.issue_upload(chunk)
        return found

    def _evict(self, buffer: Buffer) -> None:
        assert buffer.chunk is not None
        self._by_chunk.pop(buffer.chunk.index, None)
        with self._lock:
            # If nobody has waited for these, what comes next on the compute stream must not overtake them.
            self.streams.compute.wait_event(buffer.uploaded)
            self.streams.compute.wait_event(buffer.gathered)
            buffer.become(Residency.EMPTY)
            if self.poison:
                buffer.memory.fill_(float("nan"))
                self.streams.compute.record_event(buffer.free)

    def _upload(self, buffer: Buffer, chunk: Chunk) -> None:
        weight, h2d, self._last_upload = chunk.current_weight, self.streams.h2d, buffer.uploaded
        self.fetches += 1
        self.uploaded_bytes += 0 if chunk.persistent else weight.nbytes
        h2d.wait_event(chunk.updated)
        h2d.wait_event(buffer.gathered)  # which may have had no reader
        with span(UP, f"weights {chunk.index}"):
            self.streams.upload(buffer.memory[chunk.shard], weight, after=buffer.free, done=buffer.uploaded)
        h2d.record_event(chunk.uploaded)

    def _make_whole(self, buffer: Buffer, chunk: Chunk) -> None:
        """Let compute use the whole weight of ``chunk`` in its ``buffer``. The main thread alone calls this.

        The thread waits for an update of the chunk, and issues the upload if nobody has: the update may have ended just
        when the buffer was assigned. The device waits for the upload. With several ranks it gathers their shards.
        """
        if buffer.state is Residency.ASSIGNED:
            chunk.wait_for_update()
            self.issue_upload(chunk)
        if buffer.state is Residency.UPLOADED:
            if self._ranks.several:
                running = self.streams.running(self.streams.gather, after=buffer.uploaded, done=buffer.gathered)
                with span(GATHER, f"gather {chunk.index}"), running:
                    self._ranks.gather(buffer.memory[: chunk.elements], f"the gather of chunk {chunk.index}")
            else:
                self.streams.compute.wait_event(buffer.uploaded)
            buffer.become(Residency.WHOLE)
