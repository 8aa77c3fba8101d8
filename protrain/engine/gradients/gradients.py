"""Gradients: from autograd into chunks, to the host, accumulated, and their norm.

A hook takes each gradient as autograd finishes it. When backward leaves a unit, its gradients are flattened into their
chunks: in place for a persistent chunk, into one of two staging buffers and from there to host memory for the others.
The same pass over the data yields sums of squares per tile of a parameter, in an order that depends on the parameter
alone, so the norm is the same bits under every plan.

[Note: accumulation] A step of several backwards needs fp32 accumulators. Where the plan is for that every chunk has one
from the start, and 16-bit gradients on their way to those in host memory take turns in a few regions. Otherwise the
first backward of a step leaves 16-bit gradients, and for a second one accumulators are made on demand: on the device
while the budget has room, in host memory otherwise, and in either place the same additions in the same order. A chunk
whose device states are updated from a host accumulator streams it through staging, or, where it is larger, in parts
through the room of its own 16-bit gradient, which nothing else needs from then on, or through a region that it
borrows. Where chunks share regions for 16-bit gradients (:mod:`protrain.engine.gradients.regions`) those do not last
until the next backward: accumulators are made by the first that only accumulates.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from protrain.common.errors import PlanError
from protrain.engine.gradients.regions import Regions
from protrain.engine.states.arena import Arena, aligned
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.streams import Mark, Streams
from protrain.engine.updates.worker import HostWorker
from protrain.engine.weights.parameter import take_gradient
from protrain.planning.layout import STAGING_BUFFERS
from protrain_kernels import PADDING, flatten, host_accumulate, sum_of_squares, tiles


class Gradients:
    """Collects the gradients of one step; reset by ``zero_grad``."""

    def __init__(
        self,
        *,
        members: list[Member],
        device: torch.device,
        dtype: torch.dtype,
        staging_elements: tuple[int, int],  # and of that of large chunks
        streams: Streams,
        worker: HostWorker,
        arena: Arena,
        spare_device_bytes: int,
        host_bytes: int,
        region_elements: tuple[int, int],  # of those of persistent chunks, of others
        n_device_regions: int,
        n_host_regions: int,
        poison: bool,
    ) -> None:
        self.members = members
        self.device = device
        self.dtype = dtype
        self.streams = streams
        self.worker = worker
        self.arena = arena
        self.spare_device_bytes = spare_device_bytes  # that the plan left over: for accumulators
        self.host_bytes = host_bytes
        self.poison = poison
        self.pending: list[tuple[Member, Tensor]] = []
        self.present = [False] * len(members)  # has a gradient since zero_grad
        self.forgotten: set[int] = set()  # of these, those whose .grad was set to None
        self.no_sync = False  # the current backward only accumulates (model.no_sync)
        self.delivered: set[int] = set()  # members whose gradient came in this backward
        self._tile_offsets, n_tiles = [], 0
        for member in members:
            self._tile_offsets.append(n_tiles)
            n_tiles += tiles(member.numel) if member.group >= 0 else 0
        self.partials = torch.zeros(n_tiles, dtype=torch.float32, device=device)
        self._host_partials: Tensor | None = None
        self._filled = streams.mark()
        self._filled_whole = streams.mark()
        self._drained = [streams.mark() for _ in range(STAGING_BUFFERS)]
        self._large_drained = streams.mark()
        for mark in (*self._drained, self._large_drained):
            streams.compute_reached(mark)
        self._turn = 0
        self._staging_elements = 0
        self._staging_memory = torch.empty(0, dtype=dtype, device=device)
        self._need_staging(staging_elements[0])
        self._large_staging = streams.lasting(torch.zeros(staging_elements[1], dtype=dtype, device=device))
        self._device_region, self._host_region = region_elements
        self._on_device = streams.lasting(
            torch.zeros((n_device_regions, self._device_region), dtype=dtype, device=device)
        )
        self._regions = {  # by whether they are those of persistent chunks
            persistent: Regions(memory, more=more)
            for persistent, memory, more in (
                (True, list(self._on_device), self._another_on_device),
                (False, [arena.take(self._host_region, dtype) for _ in range(n_host_regions)], self._another_on_host),
            )
            if memory
        }

    @property
    def device_bytes(self) -> int:
        """Device memory that lies here for good."""
        staging = self._staging_memory.nbytes + self._large_staging.nbytes
        return self.partials.nbytes + staging + self._on_device.nbytes

    def is_pending(self, index: int) -> bool:
        """Whether parameter ``index`` has a gradient that step() has not been told to forget."""
        stored = self.present[index] and index not in self.forgotten
        return stored or any(member.index == index for member, _ in self.pending)

    def collect(self, member: Member) -> None:
        """Take the gradient that autograd has just finished for ``member``."""
        gradient = take_gradient(member.parameter)
        if gradient is not None and member.group >= 0:
            self.pending.append((member, gradient.detach()))

    def discard(self, member: Member) -> None:
        """Drop the gradient that autograd has just finished for ``member``."""
        take_gradient(member.parameter)

    def abandon(self) -> None:
        """Forget what a backward that raised has brought and no :meth:`flush` has stored."""
        self.pending.clear()
        for member in self.members:  # a hook that raised kept some from being collected
            take_gradient(member.parameter)

    def flush(self) -> list[Chunk]:
        """Move what is pending into chunks. Returns the chunks that received something."""
        if not self.pending:
            return []
        pending = sorted(self.pending, key=lambda item: (item[0].chunk.index, item[0].offset))
        self.pending = []
        touched = []
        for _, items in groupby(pending, key=lambda item: item[0].chunk.index):
            group = list(items)
            chunk = group[0][0].chunk
            again = [item for item in group if self.present[item[0].index]]
            first = [item for item in group if not self.present[item[0].index]]
            if chunk.accumulator is None and self._accumulates(chunk, again=bool(again)):
                self._make_accumulator(chunk)
            self._store(chunk, first, accumulate=False)
            self._store(chunk, again, accumulate=True)
            for member, _ in group:
                self.present[member.index] = True
                self.delivered.add(member.index)
            touched.append(chunk)
        return touched

    def give_back(self, chunk: Chunk) -> None:
        """The update of ``chunk`` is queued, and nothing else needs its gradient."""
        if (regions := self._shared(chunk)) is not None:
            regions.give_back(chunk)

    def reset(self) -> None:
        """Forget every gradient (``zero_grad``)."""
        for regions in self._regions.values():
            regions.give_all_back()
        self.pending.clear()
        self.present = [False] * len(self.members)
        self.forgotten.clear()
        self.partials.zero_()

    def norm_squared(self) -> Tensor:
        """Sum of squares of all present gradients: fp64, 0-d, on the device."""
        self._complete_partials()
        return self.partials.double().sum()

    def sums_of_squares(self) -> tuple[list[int], Tensor]:
        """The same of each gradient: numbers of the parameters that are trained, and as many sums."""
        self._complete_partials()
        indices = [member.index for member in self.members if member.group >= 0]
        parts = self.partials.double().split([tiles(self.members[index].numel) for index in indices])
        # Squares are positive: the 1-norm is their sum.
        return indices, torch.stack(torch._foreach_norm(parts, 1))

    def _complete_partials(self) -> None:
        on_host = [m for m in self.members if m.group >= 0 and m.chunk.accumulator_on_host]
        if on_host:
            self._sum_host_accumulators(on_host)

    def device_gradient(self, chunk: Chunk) -> Iterator[tuple[int, Tensor]]:
        """The gradient of a persistent chunk on the device, for its update at once: parts and where they begin.

        A part may lie in the staging memory, until the next is asked for.
        """
        if not chunk.accumulator_on_host:
            gradient = chunk.accumulator if chunk.accumulator is not None else chunk.grad
            assert gradient is not None
            yield 0, gradient
            return
        assert chunk.accumulator is not None
        chunk.wait_for_accumulation()  # and with it for what was offloaded from chunk.grad
        room = self._staging_memory
        if chunk.elements > self._staging_elements:
            own = self._own_staging(chunk)
            if own.numel() > PADDING:
                room = own[: own.numel() // (2 * PADDING) * (2 * PADDING)]
            else:
                self._need_staging(chunk.elements)
                room = self._staging_memory
        memory = room.view(torch.float32)
        for start in range(0, chunk.elements, memory.numel()):
            source = chunk.accumulator[start : start + memory.numel()]
            target = memory[: source.numel()]
            for mark in self._drained:
                self.streams.compute_waits(mark)
            self.streams.compute_reached(self._filled)
            self.streams.upload(target, source, after=self._filled, done=self._drained[0])
            self.streams.compute_waits(self._drained[0])
            yield start, target

    def host_gradient(self, chunk: Chunk) -> Tensor:
        """The gradient of a non-persistent chunk in host memory, complete once ``chunk.offloaded`` is reached."""
        gradient = chunk.accumulator if chunk.accumulator is not None else chunk.grad
        assert gradient is not None
        return gradient

    def _shared(self, chunk: Chunk) -> Regions | None:
        """Those that ``chunk`` takes turns in with others; None: it has a gradient of its own."""
        return None if chunk.large and not chunk.persistent else self._regions.get(chunk.persistent)

    def _borrow(self, chunk: Chunk) -> None:
        if (regions := self._shared(chunk)) is not None:
            regions.borrow(chunk)

    def _another_on_device(self) -> Tensor:
        count = self._device_region * self.dtype.itemsize
        if count > self.spare_device_bytes:
            raise self._no_region("device", count, self.spare_device_bytes, "device_memory")
        self.spare_device_bytes -= count
        return self.streams.lasting(torch.zeros(self._device_region, dtype=self.dtype, device=self.device))

    def _another_on_host(self) -> Tensor:
        count = aligned(self._host_region * self.dtype.itemsize)
        left = self.host_bytes - self.arena.total_bytes
        if count > left:
            raise self._no_region("host", count, left, "host_memory")
        return self.arena.take(self._host_region, self.dtype)

    def _no_region(self, where: str, needed_bytes: int, available_bytes: int, option: str) -> PlanError:
        return PlanError(
            where=where,
            needed_bytes=needed_bytes,
            available_bytes=max(0, available_bytes),
            largest_part="another chunk's gradients",
            remedy="Parameters without a gradient in this backward keep more chunks waiting for its end than were "
            f"planned for: allow more {option}, or set requires_grad=False for parameters that are never used.",
        )

    def _accumulates(self, chunk: Chunk, *, again: bool) -> bool:
        """Whether ``chunk`` needs an accumulator now; ``again`` is whether it has a gradient already."""
        if self._shared(chunk) is not None:
            return again or self.no_sync
        return again and not (chunk.persistent and self.dtype is torch.float32)

    def _store(self, chunk: Chunk, items: list[tuple[Member, Tensor]], *, accumulate: bool) -> None:
        if not items:
            return
        members = [member for member, _ in items]
        gradients = [gradient.contiguous() for _, gradient in items]
        offsets = [member.offset for member in members]
        tile_offsets = [self._tile_offsets[member.index] for member in members]
        if chunk.persistent and not chunk.accumulator_on_host:
            if chunk.accumulator is None:
                self._borrow(chunk)
            target = chunk.accumulator if chunk.accumulator is not None else chunk.grad
            assert target is not None
            flatten(gradients, target, offsets, self.partials, tile_offsets, accumulate=accumulate)
            return
        if chunk.persistent and chunk.elements > self._staging_elements:
            staging, drained = self._own_staging(chunk), self._filled_whole
            self.streams.compute_waits(chunk.offloaded)
        elif chunk.large and not chunk.persistent:
            staging, drained = self._large_staging[: chunk.elements], self._large_drained
            self.streams.compute_waits(drained)
        else:
            turn = self._turn
            self._turn = (turn + 1) % STAGING_BUFFERS
            staging, drained = self._staging[turn], self._drained[turn]
            self.streams.compute_waits(drained)
        if self.poison:
            staging.fill_(float("nan"))
        flatten(gradients, staging, offsets, self.partials, tile_offsets, accumulate=False)
        ranges = _merged(members)
        if not chunk.persistent:
            self._borrow(chunk)
        self._offload(chunk, staging, ranges, drained)
        if chunk.accumulator is not None:
            self._add_on_host(chunk, ranges, initialise=not accumulate)
            self.give_back(chunk)

    def _offload(self, chunk: Chunk, source: Tensor, ranges: list[tuple[int, int]], drained: Mark) -> None:
        assert chunk.landing is not None
        # Additions before read the landing region, and updates, which no forward waits for when a graph is used again.
        chunk.wait_for_landing()
        self.streams.compute_reached(self._filled)
        for start, stop in ranges:
            self.streams.offload(
                chunk.landing[start:stop], source[start:stop], after=self._filled, done=chunk.offloaded
            )
        self.streams.offload_reached(drained)

    def _add_on_host(self, chunk: Chunk, ranges: list[tuple[int, int]], *, initialise: bool) -> None:
        accumulator, landing = chunk.accumulator, chunk.landing
        assert accumulator is not None
        assert landing is not None

        def add() -> None:
            chunk.offloaded.wait()
            for start, stop in ranges:
                host_accumulate(
                    accumulator[start:stop], landing[start:stop], initialise=initialise, threads=self.worker.threads
                )

        chunk.accumulation = self.worker.submit(add, f"accumulate {chunk.index}")

    def _make_accumulator(self, chunk: Chunk) -> None:
        """Give ``chunk`` an fp32 accumulator that starts as the gradient it has, if any. See [Note: accumulation]."""
        count = chunk.elements * 4
        begun = any(self.present[member.index] for member in chunk.members)
        if chunk.persistent and count <= self.spare_device_bytes:
            chunk.accumulator = torch.zeros(chunk.elements, dtype=torch.float32, device=self.device)
            if begun:
                assert chunk.grad is not None
                chunk.accumulator.copy_(chunk.grad)
            self.spare_device_bytes -= count
            return
        count = aligned(count) + (aligned(chunk.elements * self.dtype.itemsize) if chunk.persistent else 0)
        if self.arena.total_bytes + count > self.host_bytes:
            raise PlanError(
                where="host",
                needed_bytes=self.arena.total_bytes + count,
                available_bytes=self.host_bytes,
                largest_part="fp32 accumulators of gradients",
                remedy="Summing the gradients of several backward() calls takes 4 bytes a parameter, for which this "
                "plan has no room: pass their number as accumulation= to protrain.wrap.",
            )
        chunk.accumulator_on_host = True
        chunk.accumulator = self.arena.take(chunk.elements, torch.float32)
        whole = [(0, chunk.elements)]
        if chunk.persistent:
            if chunk.grad is not None:
                self.streams.lasting(chunk.grad)  # copies will use it
            chunk.landing = self.arena.take(chunk.elements, self.dtype)
            if begun:
                assert chunk.grad is not None
                self._offload(chunk, chunk.grad, whole, self._filled_whole)
        if begun:
            self._add_on_host(chunk, whole, initialise=True)

    def _sum_host_accumulators(self, members: list[Member]) -> None:
        if self._host_partials is None:
            self._host_partials = self.arena.take(self.partials.numel(), torch.float32)
            self._uploaded = self.streams.mark()
            self._from_host = torch.empty_like(self.partials)
            self._on_host = torch.zeros_like(self.partials, dtype=torch.bool)
        host_partials = self._host_partials
        host_partials.zero_()
        for member in members:
            start = self._tile_offsets[member.index]
            stop = start + tiles(member.numel)
            self._on_host[start:stop] = True
            if self.present[member.index]:
                member.chunk.wait_for_accumulation()
                assert member.chunk.accumulator is not None
                values = member.chunk.accumulator[member.offset : member.offset + member.numel]
                sum_of_squares(values, host_partials[start:stop])
        self.streams.compute_reached(self._filled)
        self.streams.upload(self._from_host, host_partials, after=self._filled, done=self._uploaded)
        self.streams.compute_waits(self._uploaded)
        self._uploaded.wait()  # the host vector is rewritten by the next call
        torch.where(self._on_host, self._from_host, self.partials, out=self.partials)

    def _own_staging(self, chunk: Chunk) -> Tensor:
        """Of a persistent chunk whose gradients are summed on the host: the room that its gradient has on the device.

        Where chunks take turns in that it is the chunk's until :meth:`give_back`.
        """
        self._borrow(chunk)
        assert chunk.grad is not None
        return chunk.grad

    def _need_staging(self, elements: int) -> None:
        if elements <= self._staging_elements:
            return
        for mark in self._drained:
            self.streams.compute_waits(mark)  # before the allocator may hand the old memory out again
        # One allocation, so that both halves together can also carry one chunk in fp32.
        self._staging_elements = elements
        self._staging_memory = self.streams.lasting(
            torch.zeros(STAGING_BUFFERS * elements, dtype=self.dtype, device=self.device)
        )
        self._staging = list(self._staging_memory.view(STAGING_BUFFERS, elements))


def _merged(members: list[Member]) -> list[tuple[int, int]]:
    """Element ranges that cover ``members`` (in offset order) and their padding, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for member in members:
        stop = member.offset + -(-member.numel // 128) * 128
        if ranges and ranges[-1][1] == member.offset:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((member.offset, stop))
    return ranges
