"""Gradients on their way to host memory, and the fp32 sums of several backwards.

A gradient is flattened into a lane on the device, which is staging memory, and copied to host memory from there. Two
lanes serve all chunks in turns. The chunks of large parameters have one of their own, which is larger.

[Note: sums] A step of several backwards adds its gradients in fp32, always on the device. The sum of a chunk lies in
one of three places:

    persistent chunk    on the device, like its other states
    on the device       the chunk's other states are in host memory. The finished sum is rounded to the type of the
                        weights and sent there: after the last backward, or in step() if there were fewer than planned
    in host memory      in every backward the sum passes through the device in parts: a part comes to a buffer, the
                        gradient is added to it, and it goes back

Additions to sums in host memory run on the stream of reductions, under the backward of the next unit. So does the
rounding of finished sums.

A sum that is not sent stays fp32. The norm and the update each round it once to the type of the weights when they read
it (``protrain_kernels.rounding``), so they see a gradient of that type after any number of backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Chunk
from protrain.engine.streams import Mark, span
from protrain.engine.units import ManagedModel
from protrain.planning.layout import STAGING_BUFFERS, SUM_BUFFERS
from protrain.planning.timeline import DOWN, UP
from protrain_kernels import Slice, fold, in_parts

ABSENT = -0.0  # what begins a sum, and what a rank without a gradient adds: no value changes by it


class Lane:
    """Buffers on the device that one chunk's gradient passes through while the one before is still under way."""

    def __init__(self, memory: EngineMemory, *, sent: int, shard: int) -> None:
        streams = memory.streams
        self.sent = memory.zeros(sent)  # a gradient on its way to other ranks
        self.shard = memory.zeros(shard)  # a gradient on its way to host memory
        self.sent_free = streams.mark()  # the exchange has read ``sent``
        self.shard_free = streams.mark()  # ``shard`` is read
        streams.compute.place(self.sent_free)
        streams.compute.place(self.shard_free)


class _SumBuffer(NamedTuple):
    """A buffer on the device that a part of a sum in host memory passes through."""

    memory: Tensor
    there: Mark  # the sum has arrived
    free: Mark  # it has gone back


class HostGradients:
    """The lanes, copies of gradients to host memory, and additions to sums.

    Args:
        managed: the model.
        partials: sums of squares of the tiles of all parameters, which an addition to a sum leaves there.
    """

    def __init__(self, managed: ManagedModel, partials: Tensor) -> None:
        memory, layout, plan = managed.memory, managed.layout, managed.plan
        self._streams = streams = memory.streams
        self._partials = partials
        self._filled = streams.mark()  # a lane has its content
        self.added = streams.mark()  # the last addition to a sum is done
        streams.compute.place(self.added)
        sent, shard = layout.reduction_elements(), layout.lane_elements(plan.n_persist, plan.device_sums)
        self._usual = [Lane(memory, sent=sent[0], shard=shard[0]) for _ in range(STAGING_BUFFERS)]
        self._large = Lane(memory, sent=sent[1], shard=shard[1])
        self._turn = 0
        self._sum_elements = layout.sum_elements(plan.n_persist, plan.device_sums)
        parts = [memory.zeros(self._sum_elements, dtype=torch.float32) for _ in range(SUM_BUFFERS)]
        self._sums = deque(_SumBuffer(part, streams.mark(), streams.mark()) for part in parts)
        for each in self._sums:
            streams.compute.place(each.free)
        # By chunk, where its sum on the device is not in host memory yet, as (first element, the one after the last).
        self._unsent: dict[Chunk, set[tuple[int, int]]] = {}

    def lane(self, chunk: Chunk) -> Lane:
        """The lane of the next gradient of ``chunk``."""
        if chunk.large:
            return self._large
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        return self._usual[self._turn]

    def offload(self, chunk: Chunk, lane: Lane, ranges: Sequence[slice]) -> None:
        """Copy ``ranges`` of ``lane.shard``, which the compute stream has filled, to the gradient in host memory."""
        self._streams.compute.place(self._filled)
        target, source = chunk.host_grad, lane.shard
        assert target is not None
        self._offload(chunk, [(target[part], source[part]) for part in ranges], lane, after=self._filled)

    def add(
        self,
        chunk: Chunk,
        lane: Lane,
        own: slice,
        pieces: Tensor,
        slices: Sequence[Slice],
        *,
        target: Tensor,
        again: bool,
    ) -> None:
        """Add up the rows of ``pieces``, and to the sum of ``chunk`` if it has one, on the stream of reductions.

        Args:
            chunk: whose gradient or sum is to be had where its states lie, or where ``send`` takes it from.
            lane: of the chunk.
            own: the part of the shard of this rank.
            pieces: [ranks, elements of ``own``] the gradients of all ranks, in their order. The compute stream or that
                of reductions has written them.
            slices: the parameters in ``own``.
            target: gets the gradient. It is a part of ``lane.shard``, unless the chunk is persistent and has no sum.
            again: whether the step has brought gradients of ``own`` before.
        """
        streams, total = self._streams, None if chunk.accumulator is None else chunk.accumulator[own]
        streams.compute.place(self._filled)
        streams.reduce.wait_for(lane.shard_free)
        if total is not None and chunk.accumulator_on_host:
            self._add_to_host(chunk, lane, total, pieces, slices, target=target, again=again)
            return
        self._fold(chunk, pieces, slices, target, total, again=again)
        if total is not None and not chunk.persistent:
            self.note(chunk, [own])
        elif chunk.host_grad is not None:
            self._offload(chunk, [(chunk.host_grad[own], target)], lane, after=self.added)

    def _add_to_host(
        self,
        chunk: Chunk,
        lane: Lane,
        total: Tensor,
        pieces: Tensor,
        slices: Sequence[Slice],
        *,
        target: Tensor,
        again: bool,
    ) -> None:
        """``add`` for a sum in host memory, of which ``total`` is the part."""
        streams = self._streams
        chunk.wait()  # an update may read the sum, if no forward has come in between
        if again:
            streams.h2d.wait_for(chunk.offloaded)
        for part, own in in_parts(tuple(slices), self._sum_elements):
            buffer = self._sums[0]
            self._sums.rotate(-1)
            here, home = buffer.memory[: part.stop - part.start], total[part]
            streams.reduce.wait_for(buffer.free)
            if again:
                with span(UP, f"sum {chunk.index}"):
                    streams.upload(here, home, after=buffer.free, done=buffer.there)
                streams.reduce.wait_for(buffer.there)
            self._fold(chunk, pieces[:, part], own, target[part], here, again=again)
            with span(DOWN, f"sum {chunk.index}"):
                streams.offload(home, here, after=self.added, done=chunk.offloaded)
            streams.d2h.place(buffer.free)
        streams.reduce.place(lane.shard_free)

    def _fold(
        self,
        chunk: Chunk,
        pieces: Tensor,
        slices: Sequence[Slice],
        target: Tensor,
        total: Tensor | None,
        *,
        again: bool,
    ) -> None:
        with self._streams.reduce.running(after=self._filled, done=self.added):
            if total is not None and not again:
                total.fill_(ABSENT)
            fold(pieces, slices, gradient=target, accumulator=total, factor=chunk.sum_factor, partials=self._partials)

    def note(self, chunk: Chunk, ranges: Sequence[slice]) -> None:
        """Gradients were added to ``ranges`` of the sum of ``chunk``, which the device has for host memory."""
        self._unsent.setdefault(chunk, set()).update((part.start, part.stop) for part in ranges)

    def send(self, chunk: Chunk) -> None:
        """Round what was added to the sum of ``chunk`` on the device, if it has one, and copy it to host memory."""
        if chunk not in self._unsent:
            return
        ranges = [slice(*each) for each in sorted(self._unsent.pop(chunk))]
        streams, lane = self._streams, self.lane(chunk)
        assert chunk.accumulator is not None
        assert chunk.host_grad is not None
        streams.compute.place(self._filled)
        streams.reduce.wait_for(lane.shard_free)
        with streams.reduce.running(after=self._filled, done=self.added):
            for part in ranges:
                torch.mul(chunk.accumulator[part], chunk.sum_factor, out=lane.shard[part])
        copies = [(chunk.host_grad[part], lane.shard[part]) for part in ranges]
        self._offload(chunk, copies, lane, after=self.added)

    def send_all(self) -> None:
        """``send`` every chunk."""
        for chunk in list(self._unsent):
            self.send(chunk)

    def reset(self) -> None:
        """Forget what was not sent, as all gradients are forgotten."""
        self._streams.compute.wait_for(self.added)  # what is added on the other stream must not come later
        self._unsent.clear()

    def _offload(self, chunk: Chunk, copies: Sequence[tuple[Tensor, Tensor]], lane: Lane, *, after: Mark) -> None:
        chunk.wait()  # an update may read the target, if no forward has come in between
        for target, source in copies:
            with span(DOWN, f"gradients {chunk.index}"):
                self._streams.offload(target, source, after=after, done=chunk.offloaded)
        self._streams.d2h.place(lane.shard_free)
