"""Gradients: from autograd into chunks, to host memory, summed over several backwards, and their norm.

A hook takes each gradient as soon as autograd has finished it. When backward leaves a unit, the gradients of the unit
are flattened into their chunks. Those of a persistent chunk go into its gradient; all others go into one of two staging
buffers and from there to host memory. The same pass over the data yields the sums of squares of each tile of a
parameter. Their order depends on nothing but the parameter, so the norm has the same bits under every plan.

[Note: accumulation] A step of several backwards needs fp32 accumulators. If the plan is for such steps, every chunk has
an accumulator from the start, and 16-bit gradients on their way to the accumulators in host memory share a few buffers.
If it is not, the first backward of a step leaves 16-bit gradients, and accumulators are made for the second: on the
device while the budget allows, and in host memory otherwise. Either place does the same additions in the same order. A
chunk that the device updates from an accumulator in host memory streams it through the staging buffers. If the chunk is
larger than these, it is streamed in parts through the memory of its own 16-bit gradient, which nothing else needs from
then on, or through a buffer of the gradient pool. Gradients in a pool (``protrain.engine.gradients.pool``) do not
last until the next backward, so that the first backward under no_sync() makes accumulators for their chunks.

The sum stays fp32. The norm and the update each round it once to the type of the weights when they read it
(``protrain_kernels.rounding``), so they see a gradient of that type after any number of backwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from protrain.common.errors import MisuseError, PlanError
from protrain.engine.gradients.norm import SquareSums
from protrain.engine.gradients.pool import GradientPool
from protrain.engine.states.arena import aligned
from protrain.engine.states.chunks import Chunk, ChunkState, Member
from protrain.engine.streams import Mark
from protrain.engine.units import ManagedModel
from protrain.engine.updates.worker import HostWorker
from protrain.engine.weights.parameter import take_gradient
from protrain.planning.layout import STAGING_BUFFERS
from protrain_kernels import PADDING, flatten, host_accumulate


class Gradients:
    """Collects the gradients of one step; reset by ``zero_grad``.

    Args:
        managed: the model.
        worker: adds gradients in host memory.
        device_bytes: the limit of device memory. What the plan leaves of it is for accumulators that were not planned.
        host_bytes: the limit of host memory.
    """

    def __init__(self, managed: ManagedModel, *, worker: HostWorker, device_bytes: int, host_bytes: int) -> None:
        self._memory = memory = managed.memory
        layout, plan = managed.layout, managed.plan
        self.members = members = managed.members
        self.device, dtype = memory.device, memory.dtype
        self.dtype = dtype
        self.streams = streams = memory.streams
        self.worker = worker
        self.arena = memory.arena
        self.free_device_bytes = device_bytes - plan.device_bytes
        self.host_bytes = host_bytes
        self.poison = memory.poison
        self.pending: dict[Chunk, list[tuple[Member, Tensor]]] = {}
        self.present = [False] * len(members)  # whether a parameter has got a gradient since zero_grad
        self.forgotten: set[int] = set()  # present gradients whose .grad was set to None
        self.no_sync = False  # the current backward runs inside model.no_sync()
        self.delivered: set[int] = set()  # members whose gradients have arrived in this backward
        self.squares = SquareSums(memory, members, layout.cut_tiles())
        self._filled = streams.mark()  # staging memory has its content
        self._filled_whole = streams.mark()
        self._drained = [streams.mark() for _ in range(STAGING_BUFFERS)]
        self._large_drained = streams.mark()
        for mark in (*self._drained, self._large_drained):
            streams.compute.place(mark)
        # With several ranks gradients go through the buffers of a reduction.
        usual, large = (0, 0) if memory.ranks.several else layout.gradient_elements(plan.n_persist)
        self._next_staging = 0
        self._staging_elements = 0
        self._staging_memory = torch.empty(0, dtype=dtype, device=self.device)
        self._need_staging(usual)
        self._large_staging = memory.zeros(large)
        self._pool_elements = on_device, on_host = layout.region_elements(plan.n_persist)  # of one buffer
        self._device_pool = memory.zeros(plan.n_device_gradient, on_device)
        host_pool = [self.arena.take(on_host, dtype) for _ in range(plan.n_host_gradient)]
        self._pools: dict[bool, GradientPool] = {}  # by whether the chunks that share it are persistent
        if plan.n_device_gradient:
            self._pools[True] = GradientPool(self._device_pool, more=self._add_device_buffer)
        if host_pool:
            self._pools[False] = GradientPool(host_pool, more=self._add_host_buffer)

    def is_pending(self, index: int) -> bool:
        """Whether parameter ``index`` has a gradient whose .grad was not set to None."""
        stored = self.present[index] and index not in self.forgotten
        return stored or any(member.index == index for items in self.pending.values() for member, _ in items)

    def collect(self, member: Member) -> None:
        """Take the gradient of ``member`` that autograd has just finished."""
        gradient = take_gradient(member.parameter)
        if gradient is not None and member.group >= 0:
            if gradient.requires_grad:  # with create_graph=True
                gradient = gradient.detach()
            self.pending.setdefault(member.chunk, []).append((member, gradient))

    def abandon(self) -> None:
        """Drop the gradients that a failed backward has brought and no ``flush`` has stored."""
        self.pending.clear()
        for member in self.members:  # after a hook that raised some gradients were not collected
            take_gradient(member.parameter)

    def flush(self, visit: int) -> list[Chunk]:
        """Move the gradients that were collected into chunks, as backward leaves ``visit``. Returns these chunks."""
        pending, self.pending = self.pending, {}
        touched = sorted(pending, key=lambda chunk: chunk.index)
        for chunk in touched:
            items = sorted(pending[chunk], key=lambda item: item[0].offset)
            again = [item for item in items if self.present[item[0].index]]
            first = [item for item in items if not self.present[item[0].index]]
            if chunk.accumulator is None and self._accumulates(chunk, again=bool(again)):
                self._make_accumulator(chunk)
            self._store(chunk, first, accumulate=False)
            self._store(chunk, again, accumulate=True)
            for member, _ in items:
                self.present[member.index] = True
                self.delivered.add(member.index)
        return touched

    def check_backward(self) -> None:
        """MisuseError if no other backward may come."""

    def agree(self, chunk: Chunk) -> None:
        """Make known to all ranks which parameters of ``chunk`` have a gradient on any of them."""

    def combine(self, agreed: object) -> None:
        """All ranks have reduced their gradients of a backward: make known to each who has one, and the norm.

        Args:
            agreed: what must be the same on all ranks.

        Raises:
            MisuseError: it is not the same, or a gradient came too late to be reduced.
        """

    def release(self, chunk: Chunk) -> None:
        """The update of ``chunk`` is queued, and nothing else needs its gradient."""
        if (pool := self._pool_of(chunk)) is not None:
            pool.release(chunk)

    def forget(self, index: int) -> bool:
        """The user has set ``.grad`` of parameter ``index`` to None. Returns whether this was the last gradient."""
        if not self.present[index]:
            raise MisuseError(
                f"backward is just computing the gradient of {self.members[index].name}: set it to None when "
                "backward is over, or in a hook that is registered before protrain.wrap"
            )
        self.forgotten.add(index)
        return not self.pending and len(self.forgotten) == sum(self.present)

    def reset(self) -> None:
        """Forget every gradient (``zero_grad``)."""
        for pool in self._pools.values():
            pool.release_all()
        self.pending.clear()
        self.present = [False] * len(self.members)
        self.forgotten.clear()
        self.squares.reset()

    def device_gradient(self, chunk: Chunk) -> Iterator[tuple[int, Tensor]]:
        """The gradient of a persistent chunk on the device: parts of it and the elements at which they begin.

        A part may lie in staging memory, where the next part overwrites it.
        """
        if not chunk.accumulator_on_host:
            yield 0, chunk.gradient
            return
        assert chunk.accumulator is not None
        chunk.wait()  # for the sum, which itself has waited for the offload of chunk.grad
        memory = self._staging_memory
        if chunk.elements > self._staging_elements:
            own = self._own_staging(chunk)
            if own.numel() > PADDING:
                memory = own[: own.numel() // (2 * PADDING) * (2 * PADDING)]
            else:
                self._need_staging(chunk.elements)
                memory = self._staging_memory
        memory = memory.view(torch.float32)
        for start in range(0, chunk.elements, memory.numel()):
            source = chunk.accumulator[start : start + memory.numel()]
            target = memory[: source.numel()]
            for mark in self._drained:
                self.streams.compute.wait_for(mark)
            self.streams.compute.place(self._filled)
            self.streams.upload(target, source, after=self._filled, done=self._drained[0])
            self.streams.compute.wait_for(self._drained[0])
            yield start, target

    def _pool_of(self, chunk: Chunk) -> GradientPool | None:
        """The pool in which ``chunk`` shares memory for its gradient. None: it has a gradient of its own."""
        return None if chunk.large and not chunk.persistent else self._pools.get(chunk.persistent)

    def _acquire(self, chunk: Chunk) -> None:
        if (pool := self._pool_of(chunk)) is not None:
            pool.acquire(chunk)

    def _add_device_buffer(self) -> Tensor:
        elements = self._pool_elements[0]
        count = elements * self.dtype.itemsize
        if count > self.free_device_bytes:
            raise self._pool_error("device", count, self.free_device_bytes)
        self.free_device_bytes -= count
        return self._memory.zeros(elements)

    def _add_host_buffer(self) -> Tensor:
        elements = self._pool_elements[1]
        count = aligned(elements * self.dtype.itemsize)
        left = self.host_bytes - self.arena.total_bytes
        if count > left:
            raise self._pool_error("host", count, left)
        return self.arena.take(elements, self.dtype)

    def _pool_error(self, where: str, needed_bytes: int, available_bytes: int) -> PlanError:
        return PlanError(
            where=where,
            needed_bytes=needed_bytes,
            available_bytes=max(0, available_bytes),
            largest_part="another chunk's gradients",
            remedy="Parameters without a gradient in this backward keep more chunks waiting for its end than "
            f"planned: allow more {where}_memory, or set requires_grad=False for parameters that are never used.",
        )

    def _accumulates(self, chunk: Chunk, *, again: bool) -> bool:
        """Whether ``chunk`` needs an accumulator now. ``again`` tells whether one of its parameters has a gradient."""
        if self._pool_of(chunk) is not None:
            return again or self.no_sync
        return again and not (chunk.persistent and self.dtype is torch.float32)

    def _store(self, chunk: Chunk, items: list[tuple[Member, Tensor]], *, accumulate: bool) -> None:
        if not items:
            return
        members = [member for member, _ in items]
        gradients = [gradient.contiguous() for _, gradient in items]
        offsets = [member.offset for member in members]
        squares, tile_offsets = self.squares.partials, [self.squares.offsets[member.index] for member in members]
        if chunk.persistent and not chunk.accumulator_on_host:
            if chunk.accumulator is None:
                self._acquire(chunk)
            where = offsets, squares, tile_offsets
            flatten(gradients, chunk.gradient, *where, accumulate=accumulate, weight_dtype=self.dtype)
            return
        if chunk.persistent and chunk.elements > self._staging_elements:
            staging, drained = self._own_staging(chunk), self._filled_whole
            self.streams.compute.wait_for(chunk.offloaded)
        elif chunk.large and not chunk.persistent:
            staging, drained = self._large_staging[: chunk.elements], self._large_drained
            self.streams.compute.wait_for(drained)
        else:
            index = self._next_staging
            self._next_staging = (index + 1) % STAGING_BUFFERS
            staging, drained = self._staging[index], self._drained[index]
            self.streams.compute.wait_for(drained)
        if self.poison:
            staging.fill_(float("nan"))
        flatten(gradients, staging, offsets, squares, tile_offsets, accumulate=False)
        ranges = _merged(members)
        if not chunk.persistent:
            self._acquire(chunk)
        self._offload(chunk, staging, ranges, drained)
        if chunk.accumulator is not None:
            self._add_on_host(chunk, ranges, initialise=not accumulate)
            self.release(chunk)

    def _offload(self, chunk: Chunk, source: Tensor, ranges: list[tuple[int, int]], drained: Mark) -> None:
        assert chunk.host_grad is not None
        chunk.wait()  # an addition may read it, or an update if no forward has come in between
        self.streams.compute.place(self._filled)
        for start, stop in ranges:
            self.streams.offload(
                chunk.host_grad[start:stop], source[start:stop], after=self._filled, done=chunk.offloaded
            )
        self.streams.d2h.place(drained)

    def _add_on_host(self, chunk: Chunk, ranges: list[tuple[int, int]], *, initialise: bool) -> None:
        accumulator, host_grad = chunk.accumulator, chunk.host_grad
        assert accumulator is not None
        assert host_grad is not None

        def add() -> None:
            chunk.offloaded.wait()
            for start, stop in ranges:
                host_accumulate(
                    accumulator[start:stop], host_grad[start:stop], initialise=initialise, threads=self.worker.threads
                )

        if chunk.state is not ChunkState.SUMMING:
            chunk.wait()
        job = self.worker.job(add, f"accumulate {chunk.index}")
        chunk.begin(ChunkState.SUMMING, job)
        self.worker.queue(job)

    def _make_accumulator(self, chunk: Chunk) -> None:
        """Give ``chunk`` an fp32 accumulator with the gradient that it has, if any. See [Note: accumulation]."""
        count = chunk.elements * 4
        begun = any(self.present[member.index] for member in chunk.members)
        if chunk.persistent and count <= self.free_device_bytes:
            chunk.accumulator = torch.zeros(chunk.elements, dtype=torch.float32, device=self.device)
            if begun:
                assert chunk.grad is not None
                chunk.accumulator.copy_(chunk.grad)
            self.free_device_bytes -= count
            return
        count = aligned(count) + (aligned(chunk.elements * self.dtype.itemsize) if chunk.persistent else 0)
        if self.arena.total_bytes + count > self.host_bytes:
            raise PlanError(
                where="host",
                needed_bytes=self.arena.total_bytes + count,
                available_bytes=self.host_bytes,
                largest_part="fp32 accumulators of gradients",
                remedy="To sum the gradients of several backward() calls takes 4 bytes a parameter, and this plan has "
                "no memory for that: pass the number of calls as accumulation= to protrain.wrap.",
            )
        chunk.accumulator_on_host = True
        chunk.accumulator = self.arena.take(chunk.elements, torch.float32)
        whole = [(0, chunk.elements)]
        if chunk.persistent:
            if chunk.grad is not None:
                self.streams.record_streams(chunk.grad)  # the copies below read it
            chunk.host_grad = self.arena.take(chunk.elements, self.dtype)
            if begun:
                assert chunk.grad is not None
                self._offload(chunk, chunk.grad, whole, self._filled_whole)
        if begun:
            self._add_on_host(chunk, whole, initialise=True)

    def _own_staging(self, chunk: Chunk) -> Tensor:
        """The memory of the 16-bit gradient of a persistent chunk, whose gradients are summed on the host.

        If chunks share that memory, ``chunk`` has it until ``release``.
        """
        self._acquire(chunk)
        assert chunk.grad is not None
        return chunk.grad

    def _need_staging(self, elements: int) -> None:
        if elements <= self._staging_elements:
            return
        for mark in self._drained:
            self.streams.compute.wait_for(mark)  # before the allocator may hand the old memory out again
        # One allocation, so that both halves together can hold one chunk in fp32.
        self._staging_elements = elements
        self._staging_memory = self._memory.zeros(STAGING_BUFFERS * elements)
        self._staging = list(self._staging_memory.view(STAGING_BUFFERS, elements))


def _merged(members: list[Member]) -> list[tuple[int, int]]:
    """The ranges of elements that cover ``members``, which are sorted by offset, and their padding."""
    ranges: list[tuple[int, int]] = []
    for member in members:
        if ranges and ranges[-1][1] == member.offset:
            ranges[-1] = (ranges[-1][0], member.stop)
        else:
            ranges.append((member.offset, member.stop))
    return ranges
