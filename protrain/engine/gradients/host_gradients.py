"""Gradients on their way to host memory, and the sums of several backwards there.

A gradient is flattened into staging memory on the device, and copied from there. Two staging buffers serve all chunks
in turns. The chunks of large parameters have one of their own, which is larger.

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

from protrain.common.errors import PlanError
from protrain.engine.gradients.pool import GradientPools
from protrain.engine.states.arena import whole_pages
from protrain.engine.states.chunks import Chunk, ChunkState
from protrain.engine.streams import Mark
from protrain.engine.units import ManagedModel
from protrain.engine.updates.worker import HostWorker
from protrain.planning.layout import STAGING_BUFFERS
from protrain_kernels import PADDING, host_accumulate

Ranges = list[tuple[int, int]]  # the first element of each and the one after its last


class HostGradients:
    """Staging memory, copies of gradients to host memory, and sums there.

    Args:
        managed: the model.
        pools: memory that the gradients of several chunks share.
        worker: adds gradients in host memory.
    """

    def __init__(self, managed: ManagedModel, pools: GradientPools, worker: HostWorker) -> None:
        self._memory = memory = managed.memory
        self._streams = streams = memory.streams
        self._pools = pools
        self._worker = worker
        self._filled = streams.mark()  # staging memory has its content
        self._own_drained = streams.mark()  # a persistent chunk's own gradient is read; nobody waits for it
        self._drained = [streams.mark() for _ in range(STAGING_BUFFERS)]
        self._large_drained = streams.mark()
        for mark in (*self._drained, self._large_drained):
            streams.compute.place(mark)
        # With several ranks gradients go through the buffers of a reduction.
        usual, large = (0, 0) if memory.ranks.several else managed.layout.gradient_elements(managed.plan.n_persist)
        self._next = 0
        self._staging = memory.zeros(STAGING_BUFFERS, usual)
        self._large_staging = memory.zeros(large)

    def staging(self, chunk: Chunk) -> tuple[Tensor, Mark]:
        """Memory for a gradient of ``chunk`` that ``send`` takes to host memory, and the mark of when it is read.

        The compute stream waits until the memory is free.
        """
        if chunk.persistent and chunk.elements > self._staging.shape[1]:
            self._streams.compute.wait_for(chunk.offloaded)
            return self._own_staging(chunk), self._own_drained
        if chunk.large and not chunk.persistent:
            staging, drained = self._large_staging[: chunk.elements], self._large_drained
        else:
            index = self._next
            self._next = (index + 1) % STAGING_BUFFERS
            staging, drained = self._staging[index], self._drained[index]
        self._streams.compute.wait_for(drained)
        return staging, drained

    def send(self, chunk: Chunk, ranges: Ranges, staging: Tensor, drained: Mark, *, accumulate: bool) -> None:
        """Copy ``ranges`` of a gradient of ``chunk`` to host memory. If it has an accumulator, add them to it there.

        Without ``accumulate`` they are the first of the step, and overwrite what is there.
        """
        if not chunk.persistent:
            self._pools.acquire(chunk)
        self._offload(chunk, staging, ranges, drained)
        if chunk.accumulator is not None:
            self._add(chunk, ranges, initialise=not accumulate)
            self._pools.release(chunk)

    def make_accumulator(self, chunk: Chunk, *, begun: bool) -> None:
        """Give ``chunk`` an fp32 accumulator, with the gradient that it has if one has ``begun``.

        See [Note: accumulation].

        Raises:
            PlanError: there is no memory for it.
        """
        sum_bytes = chunk.elements * 4
        if chunk.persistent and sum_bytes <= self._memory.free_device_bytes:
            self._make_on_device(chunk, begun=begun)
            self._memory.free_device_bytes -= sum_bytes
        else:
            self._make_in_host_memory(chunk, sum_bytes, begun=begun)

    def _make_on_device(self, chunk: Chunk, *, begun: bool) -> None:
        chunk.accumulator = torch.zeros(chunk.elements, dtype=torch.float32, device=self._memory.device)
        if begun:
            assert chunk.grad is not None
            chunk.accumulator.copy_(chunk.grad)

    def _make_in_host_memory(self, chunk: Chunk, sum_bytes: int, *, begun: bool) -> None:
        memory = self._memory
        needed_bytes = whole_pages(sum_bytes)
        if chunk.persistent:  # its gradients have had no place in host memory
            needed_bytes += whole_pages(chunk.elements * memory.dtype.itemsize)
        if needed_bytes > memory.free_host_bytes:
            raise PlanError(
                where="host",
                needed_bytes=memory.arena.total_bytes + needed_bytes,
                available_bytes=memory.host_bytes,
                largest_part="fp32 accumulators of gradients",
                remedy="To sum the gradients of several backward() calls takes 4 bytes a parameter, and this plan has "
                "no memory for that: pass the number of calls as accumulation= to protrain.wrap.",
            )
        chunk.accumulator_on_host = True
        chunk.accumulator = memory.arena.take(chunk.elements, torch.float32)
        whole = [(0, chunk.elements)]
        if chunk.persistent:
            if chunk.grad is not None:
                self._streams.record_streams(chunk.grad)  # the copies below read it
            chunk.host_grad = memory.arena.take(chunk.elements, memory.dtype)
            if begun:
                assert chunk.grad is not None
                self._offload(chunk, chunk.grad, whole, self._own_drained)
        if begun:
            self._add(chunk, whole, initialise=True)

    def parts_on_device(self, chunk: Chunk) -> Iterator[tuple[int, Tensor]]:
        """The gradient of a persistent chunk in parts, each with the element of the chunk at which it begins.

        A part is 1-d on the device. It may lie in staging memory, where the next part overwrites it.
        """
        if not chunk.accumulator_on_host:
            yield 0, chunk.gradient
            return
        assert chunk.accumulator is not None
        chunk.wait()  # for the sum, which itself has waited for the offload of chunk.grad
        memory = self._streaming_memory(chunk).view(torch.float32)
        for start in range(0, chunk.elements, memory.numel()):
            source = chunk.accumulator[start : start + memory.numel()]
            target = memory[: source.numel()]
            for mark in self._drained:
                self._streams.compute.wait_for(mark)
            self._streams.compute.place(self._filled)
            self._streams.upload(target, source, after=self._filled, done=self._drained[0])
            self._streams.compute.wait_for(self._drained[0])
            yield start, target

    def _streaming_memory(self, chunk: Chunk) -> Tensor:
        """Device memory, in the type of the weights, through which the sum of a persistent chunk goes in parts.

        A part must be a multiple of PADDING elements. In fp32 these take as much as 2 * PADDING weights, which have 16
        bits, as fp32 gradients are summed without an accumulator.
        """
        if chunk.elements <= self._staging.shape[1]:
            return self._staging.view(-1)
        own = self._own_staging(chunk)
        if own.numel() > PADDING:
            return own[: own.numel() // (2 * PADDING) * (2 * PADDING)]
        return self._grown_staging(chunk.elements)

    def _offload(self, chunk: Chunk, source: Tensor, ranges: Ranges, drained: Mark) -> None:
        assert chunk.host_grad is not None
        chunk.wait()  # an addition may read it, or an update if no forward has come in between
        self._streams.compute.place(self._filled)
        for start, stop in ranges:
            self._streams.offload(
                chunk.host_grad[start:stop], source[start:stop], after=self._filled, done=chunk.offloaded
            )
        self._streams.d2h.place(drained)

    def _add(self, chunk: Chunk, ranges: Ranges, *, initialise: bool) -> None:
        accumulator, host_grad, threads = chunk.accumulator, chunk.host_grad, self._worker.threads
        assert accumulator is not None
        assert host_grad is not None

        def add() -> None:
            chunk.offloaded.wait()
            for start, stop in ranges:
                host_accumulate(accumulator[start:stop], host_grad[start:stop], initialise=initialise, threads=threads)

        if chunk.state is not ChunkState.SUMMING:
            chunk.wait()
        job = self._worker.job(add, f"accumulate {chunk.index}")
        chunk.begin(ChunkState.SUMMING, job)
        self._worker.queue(job)

    def _own_staging(self, chunk: Chunk) -> Tensor:
        """The memory of the 16-bit gradient of a persistent chunk, whose gradients are summed on the host.

        If chunks share that memory, ``chunk`` has it until its update is queued.
        """
        self._pools.acquire(chunk)
        assert chunk.grad is not None
        return chunk.grad

    def _grown_staging(self, elements: int) -> Tensor:
        """Both staging buffers as one tensor, after each has got ``elements``. Together they hold a chunk in fp32."""
        for mark in self._drained:
            self._streams.compute.wait_for(mark)  # before the allocator may hand the old memory out again
        self._staging = self._memory.zeros(STAGING_BUFFERS, elements)
        return self._staging.view(-1)
