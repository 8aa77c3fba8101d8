"""Chunk buffers: the n_buffer device slots through which non-persistent chunks pass, and those for large chunks.

[Note: residency] A buffer's content goes through these states and no others:

    EMPTY -> QUEUED     a chunk is assigned; where its host update still runs, whoever finishes it issues the upload
    QUEUED -> LOADING   the upload is issued
    LOADING -> PRESENT  the compute stream was told to wait for the upload
    PRESENT -> EMPTY    evicted or out of date; only while no unit holds it
    QUEUED/LOADING -> EMPTY  given up before use; the next upload is ordered behind on the same stream

[Note: interrupts] Ctrl-C may come between any two lines. So the buffer itself says what it holds: an entry of it in the
table counts only where the buffer agrees. It is EMPTY until it is QUEUED, and that until its upload was issued: whoever
needs it issues that then, a second time if need be.
"""

from __future__ import annotations

import enum
import threading

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.states.chunks import Chunk
from protrain.engine.streams import Mark, Streams
from protrain.engine.updates.worker import Job
from protrain.engine.weights.views import Viewers
from protrain.planning.schedule import FAR, Schedule


class Residency(enum.Enum):
    """State of a buffer's content."""

    EMPTY = "empty"
    QUEUED = "queued"
    LOADING = "loading"
    PRESENT = "present"


LEGAL = frozenset(
    {
        (Residency.EMPTY, Residency.QUEUED),
        (Residency.QUEUED, Residency.LOADING),
        (Residency.LOADING, Residency.PRESENT),
        (Residency.PRESENT, Residency.EMPTY),
        (Residency.QUEUED, Residency.EMPTY),
        (Residency.LOADING, Residency.EMPTY),
    }
)


class Buffer:
    """One slot: its memory, what it holds, and the marks that order its uses."""

    def __init__(self, memory: Tensor, streams: Streams) -> None:
        self.memory = memory
        self.chunk: Chunk | None = None
        self.awaited: Job | None = None  # the update that the upload of a queued chunk follows
        self.holders = 0  # units that use it now
        self.loaded: Mark = streams.mark()
        self.free: Mark = streams.mark()  # the last kernel that read the content is done
        self.viewers = Viewers(memory)
        self._state = Residency.EMPTY

    @property
    def state(self) -> Residency:
        """Residency of the content; assigning an illegal transition is a bug of the engine."""
        return self._state

    @state.setter
    def state(self, new: Residency) -> None:
        assert (self._state, new) in LEGAL, f"illegal buffer transition {self._state.value} -> {new.value}"
        self._state = new


class BufferPool:
    """Fetches chunks into buffers ahead of their use and keeps them while they are held."""

    def __init__(
        self,
        *,
        n_buffers: tuple[int, int],  # and those for large chunks
        buffer_elements: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
        poison: bool,
    ) -> None:
        self.streams = streams
        self.poison = poison
        start = float("nan") if poison else 0.0
        # One allocation each: saved tensors are recognised by the address of their storage.
        usual, large = (
            [
                Buffer(streams.lasting(torch.full((elements,), start, dtype=dtype, device=device)), streams)
                for _ in range(n_buffer)
            ]
            for n_buffer, elements in zip(n_buffers, buffer_elements, strict=True)
        )
        self.buffers = [*usual, *large]
        self._for_large = {False: usual, True: large}
        for buffer in self.buffers:
            streams.compute_reached(buffer.free)
        self._by_chunk: dict[int, Buffer] = {}  # see _holding
        self._lock = threading.Lock()  # the update thread issues uploads too
        self._last: Mark = streams.mark()  # the last upload issued
        self.fetches = 0  # uploads issued: what tests and reports count

    def acquire(self, chunk: Chunk, schedule: Schedule) -> Tensor:
        """The weight of ``chunk`` on the device, kept there until ``release``. Blocks only for its own update."""
        buffer = self._holding(chunk.index)
        if buffer is None:
            buffer = self._free_buffer(chunk, schedule, needed_in=0)
            if buffer is None:
                names = ", ".join(member.name for member in chunk.members[:3])
                raise MisuseError(
                    f"forward uses {names} while chunk buffers hold nothing but weights that are in use around it, as "
                    "they did not in the step that was profiled: pass an example_batch with which the model runs as it "
                    "will be trained"
                )
            self._assign(buffer, chunk)
        if buffer.state is Residency.QUEUED:
            chunk.wait_for_update()
            self._issue(buffer, buffer.awaited)
        if buffer.state is Residency.LOADING:
            self.streams.compute_waits(buffer.loaded)
            buffer.state = Residency.PRESENT
        if not buffer.holders:
            buffer.viewers.begin_use()
        buffer.holders += 1
        return buffer.memory

    def acquire_all(self, chunks: list[Chunk], schedule: Schedule) -> dict[int, Tensor]:
        """The weights of all that a unit needs, by chunk index, or none of them when one cannot be had.

        What is there is taken first, lest it be given up.
        """
        acquired: dict[int, Tensor] = {}
        there_first = sorted(chunks, key=lambda chunk: self._holding(chunk.index) is None)
        try:
            for chunk in there_first:
                acquired[chunk.index] = self.acquire(chunk, schedule)
        except BaseException:  # an interrupt too, as this is where the main thread waits
            for chunk in there_first[: len(acquired)]:
                self.release(chunk)
            raise
        return acquired

    def content(self, chunk: Chunk) -> Tensor:
        """The memory of the buffer that a unit holds ``chunk`` in."""
        buffer = self._holding(chunk.index)
        assert buffer is not None
        assert buffer.holders > 0
        assert buffer.state is Residency.PRESENT
        return buffer.memory

    def held(self, chunk: Chunk) -> bool:
        """Whether any unit holds ``chunk``."""
        buffer = self._holding(chunk.index)
        return buffer is not None and buffer.holders > 0

    def release(self, chunk: Chunk) -> None:
        """End one ``acquire``."""
        buffer = self._holding(chunk.index)
        assert buffer is not None
        assert buffer.holders > 0
        if buffer.holders == 1:
            self.streams.compute_reached(buffer.free)
        buffer.holders -= 1

    def anything_held(self) -> bool:
        """Whether any unit holds any chunk."""
        return any(buffer.holders for buffer in self.buffers)

    def release_all(self) -> None:
        """End every ``acquire`` that something which was interrupted has left."""
        for buffer in self.buffers:
            if buffer.holders:
                self.streams.compute_reached(buffer.free)
                buffer.holders = 0

    def outlived(self, chunk: Chunk) -> bool:
        """Whether a view made while units held ``chunk`` is alive though none does: soon it shows another chunk."""
        buffer = self._holding(chunk.index)
        return buffer is not None and buffer.holders == 0 and buffer.viewers.are_more()

    def prefetch(self, chunks: list[Chunk], schedule: Schedule) -> None:
        """Fetch ahead, nearest first, while a buffer is free or holds what is needed later."""
        for index in schedule.upcoming():
            chunk = chunks[index]
            if self._holding(index) is not None:
                continue
            buffer = self._free_buffer(chunk, schedule, needed_in=schedule.next_use(index))
            if buffer is None:
                return
            self._assign(buffer, chunk)

    def invalidate(self, chunk: Chunk) -> None:
        """Forget the content of ``chunk``'s buffer: its weight is about to change."""
        buffer = self._holding(chunk.index)
        if buffer is not None:
            assert buffer.holders == 0, "a chunk is updated while a unit uses it"
            self._evict(buffer)

    def link_is_idle(self) -> bool:
        """Whether all uploads issued so far are over."""
        return self._last.reached()

    def _holding(self, index: int) -> Buffer | None:
        """The buffer that chunk ``index`` is in, or on its way to."""
        buffer = self._by_chunk.get(index)
        if buffer is None or buffer._state is Residency.EMPTY:
            return None
        assert buffer.chunk is not None
        return buffer if buffer.chunk.index == index else None

    def _free_buffer(self, chunk: Chunk, schedule: Schedule, *, needed_in: int) -> Buffer | None:
        """One for ``chunk``: empty, or the one whose content is needed last and later than ``needed_in`` visits.

        Of several that with the last chunk, as :mod:`protrain.planning.runtime.fetches` has it.
        """
        victim, latest = None, (needed_in, FAR)
        for buffer in self._for_large[chunk.large]:
            if buffer.state is Residency.EMPTY:
                return buffer
            assert buffer.chunk is not None
            if buffer.holders == 0:
                use = schedule.next_use(buffer.chunk.index), buffer.chunk.index
                if use > latest:
                    victim, latest = buffer, use
        if victim is not None:
            self._evict(victim)
        return victim

    def _evict(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer.state is Residency.LOADING:
                # Whatever comes next on the compute stream must not overtake the upload that nobody waited for.
                self.streams.compute_waits(buffer.loaded)
            buffer.state = Residency.EMPTY
            buffer.awaited = None
            if self.poison:
                buffer.memory.fill_(float("nan"))
                self.streams.compute_reached(buffer.free)

    def _assign(self, buffer: Buffer, chunk: Chunk) -> None:
        buffer.chunk = chunk
        buffer.awaited = update = chunk.update
        buffer.state = Residency.QUEUED
        self._by_chunk[chunk.index] = buffer
        if update is None:
            self._issue(buffer, None)
        else:
            update.when_done(lambda: self._issue(buffer, update))

    def _issue(self, buffer: Buffer, update: Job | None) -> None:
        """Upload the chunk that is queued behind ``update``, if any, once, whichever thread comes first.

        The thread that carries out updates may be so late that the chunk is queued behind the next one by then.
        """
        with self._lock:
            if buffer.state is Residency.QUEUED and buffer.awaited is update and buffer.chunk is not None:
                self._upload(buffer, buffer.chunk)
                buffer.state = Residency.LOADING

    def _upload(self, buffer: Buffer, chunk: Chunk) -> None:
        self.fetches += 1
        self._last = buffer.loaded
        self.streams.upload(
            buffer.memory[: chunk.elements], chunk.current_weight, after=buffer.free, done=buffer.loaded
        )
        self.streams.upload_reached(chunk.uploaded)
