"""Gradients on their way from autograd into chunks: those of all ranks added up, and those of several backwards.

The gradients that a visit of backward completes go through these steps, a run of neighbouring parameters at a time:

    flatten      this rank's gradients go into a lane, which is staging memory; a parameter without one sends -0.0
    exchange     every rank receives, from all ranks, what belongs to its own shard (an all_to_all)
    fold         the pieces are added in rank order in fp32, multiplied by the factor of a mean, and rounded once
    offload      the shard's gradient of a chunk in host memory goes there

One rank has nothing to exchange, and its shard is the whole chunk. So ``flatten`` writes straight into the gradient or
the sum where that is on the device, and nothing is folded.

An addition of -0.0 changes no value, so a rank without a gradient is left out of the sum. The exchange and the fold run
on the stream of reductions, under the backward of the next unit and, after that of the first unit, under the next
forward. Whatever reads gradients on the compute stream lets it wait for them first (``settle``).

[Note: sums] A step of several backwards adds its gradients in fp32, always on the device. The sum of a chunk lies in
one of three places:

    persistent chunk    on the device, like its other states
    on the device       the chunk's other states are in host memory. The finished sum is rounded to the type of the
                        weights and sent there: after the last backward, or in step() if there were fewer than planned
    in host memory      in every backward the sum passes through the device in parts: a part comes to a buffer, the
                        gradient is added to it, and it goes back

A sum that is not sent stays fp32. The norm and the update each round it once to the type of the weights when they read
it (``protrain_kernels.rounding``), so they see a gradient of that type after any number of backwards.

[Note: sums of squares] Norms are made of a partial sum for every tile of a parameter, which the pass that flattens or
adds up its gradients leaves. All partial sums are added in one fixed order, so a norm has the same bits under every
plan.

[Note: cut tiles] With several ranks, each computes the sums of the tiles that lie wholly in its shards. A shard may
begin or end in the middle of a tile, at most size - 1 times in a chunk. The ranks exchange the values of such tiles,
and all compute their sums. So every rank ends with all sums, and they have the bits of one rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.states.parameter_state import local_elements
from protrain.engine.streams import Event, span
from protrain.engine.units import ManagedModel
from protrain.planning.layout import STAGING_BUFFERS, SUM_BUFFERS
from protrain.planning.timeline import DOWN, REDUCE, UP
from protrain_kernels import Slice, flatten, fold, in_parts, tiles
from protrain_kernels.checks import TILE

ABSENT = -0.0  # what begins a sum, and what a rank without a gradient adds: no value changes by it
_MOST_RUNS = 1 << 14  # whose places are remembered


class Lane:
    """Device buffers for the reduction of one chunk's gradient. The next gradient takes another lane meanwhile."""

    def __init__(self, memory: EngineMemory, *, sent: int, shard: int) -> None:
        streams = memory.streams
        self.shard = memory.zeros(shard)  # a gradient on its way to host memory
        self.shard_free = streams.event()  # ``shard`` is read
        # A gradient on its way to other ranks, and when the exchange has read it. What one rank sends is its shard.
        self.sent, self.sent_free = (memory.zeros(sent), streams.event()) if sent else (self.shard, self.shard_free)
        streams.compute.record_event(self.sent_free)
        streams.compute.record_event(self.shard_free)


class _SumBuffer(NamedTuple):
    """A device buffer for the addition of gradients to a part of a sum in host memory."""

    memory: Tensor
    there: Event  # the sum has arrived
    free: Event  # it has gone back


@dataclass(frozen=True, eq=False)
class _Run:
    """Where a run of neighbouring parameters of a chunk lies. All counts are in elements."""

    counts: tuple[int, ...]  # what the shard of each rank has of it
    shard_slice: slice  # of the states of this rank, which are its shard
    slices: tuple[Slice, ...]  # the parameters in ``shard_slice``


class Reduction:
    """Reduces the gradients of ``managed`` into chunks, and offloads them. ``squares`` gets their sums of squares."""

    def __init__(self, managed: ManagedModel, squares: SquareSums) -> None:
        memory, layout, plan = managed.memory, managed.layout, managed.plan
        self._ranks, self._poison, self._weight_dtype = memory.ranks, memory.poison, memory.dtype
        self._streams = streams = memory.streams
        self._squares = squares
        self._filled = streams.event()  # a lane has its content
        self.added = streams.event()  # the last addition to a gradient or a sum is done
        streams.compute.record_event(self.added)
        sent, shard = layout.reduction_elements(), layout.lane_elements(plan.n_persist, plan.device_sums)
        self._usual = deque(Lane(memory, sent=sent[0], shard=shard[0]) for _ in range(STAGING_BUFFERS))
        self._large = Lane(memory, sent=sent[1], shard=shard[1])
        # What comes from all ranks, of usual chunks and of large ones. Only the stream of reductions uses it, in order.
        self._received = [memory.zeros(elements) for elements in sent]
        self._sum_elements = layout.sum_elements(plan.n_persist, plan.device_sums)
        parts = [memory.zeros(self._sum_elements, dtype=torch.float32) for _ in range(SUM_BUFFERS)]
        self._sums = deque(_SumBuffer(part, streams.event(), streams.event()) for part in parts)
        for each in self._sums:
            streams.compute.record_event(each.free)
        # By chunk, where its sum on the device is not in host memory yet, as (first element, the one after the last).
        self._unsent: dict[Chunk, set[tuple[int, int]]] = {}
        self._run = lru_cache(_MOST_RUNS)(self._placed)

    def store(self, chunk: Chunk, members: Sequence[Member], gradients: dict[int, Tensor], *, accumulate: bool) -> None:
        """Reduce the gradients of ``members`` into ``chunk``, and take them out of ``gradients``.

        All ranks call it alike, each with what it has.

        Args:
            chunk: whose gradient or sum is to be had where its states lie, or where ``send`` takes it from.
            members: some of its parameters, in the order of offsets.
            gradients: of any shapes and strides, on the device.
            accumulate: add to what the step has brought of ``members`` before. The chunk needs a sum for that.
        """
        self._squares.norms.clear()
        if self._ranks.several or chunk.accumulator_on_host:
            for run in runs(members):
                self._reduce(chunk, run, gradients, accumulate=accumulate)
            return
        values = [gradients.pop(member.index).contiguous() for member in members]
        squares, offsets = self._squares, [member.offset for member in members]
        where = offsets, squares.partials, [squares.offsets[member.index] for member in members]
        ranges = [] if chunk.persistent else [slice(run[0].offset, run[-1].stop) for run in runs(members)]
        if chunk.accumulator is None and not chunk.persistent:
            lane = self._free_lane(chunk)
            flatten(values, lane.shard, *where)
            self._streams.compute.record_event(self._filled)
            self._offload(chunk, lane, ranges, after=self._filled)
            return
        target = chunk.grad if chunk.accumulator is None else chunk.accumulator
        assert target is not None
        flatten(values, target, *where, accumulate=accumulate, weight_dtype=self._weight_dtype)
        if not chunk.persistent:
            self._note(chunk, ranges)

    def _reduce(
        self, chunk: Chunk, members: Sequence[Member], gradients: dict[int, Tensor], *, accumulate: bool
    ) -> None:
        """``store`` for a run of neighbours: exchange their gradients, and add up what all ranks have sent."""
        lane, run = self._free_lane(chunk), self._run(tuple(members))
        sent = lane.sent[members[0].offset : members[-1].stop]
        present = [member for member in members if member.index in gradients]
        if len(present) < len(members):
            sent.fill_(ABSENT)
        flatten(
            [gradients.pop(member.index).contiguous() for member in present],
            lane.sent,
            [member.offset for member in present],
        )
        self._streams.compute.record_event(self._filled)
        pieces = sent[None]  # [ranks, elements of ``run.shard_slice``], in the order of ranks
        if self._ranks.several:
            received = self._received[chunk.large][: (run.shard_slice.stop - run.shard_slice.start) * self._ranks.size]
            running = self._streams.running(self._streams.reduce, after=self._filled, done=lane.sent_free)
            with span(REDUCE, f"reduce {chunk.index}"), running:
                self._ranks.exchange(received, sent, run.counts, f"the reduction of chunk {chunk.index}")
            pieces = received.view(self._ranks.size, run.shard_slice.stop - run.shard_slice.start)
        if not run.slices:
            return
        self._streams.reduce.wait_event(lane.shard_free)
        if chunk.accumulator_on_host:
            self._add_to_host(chunk, lane, pieces, run, accumulate=accumulate)
            return
        total = None if chunk.accumulator is None else chunk.accumulator[run.shard_slice]
        target = chunk.grad if chunk.persistent and total is None else lane.shard
        assert target is not None
        self._fold(chunk, pieces, run.slices, target[run.shard_slice], total, accumulate=accumulate)
        if total is None and not chunk.persistent:
            self._offload(chunk, lane, [run.shard_slice], after=self.added)
        elif not chunk.persistent:
            self._note(chunk, [run.shard_slice])

    def _add_to_host(self, chunk: Chunk, lane: Lane, pieces: Tensor, run: _Run, *, accumulate: bool) -> None:
        """Add ``pieces`` to the sum of ``chunk`` in host memory. The lane gets the gradient, for its squares."""
        streams = self._streams
        assert chunk.accumulator is not None
        total, target = chunk.accumulator[run.shard_slice], lane.shard[run.shard_slice]
        chunk.wait()  # an update may read the sum, if no forward has come in between
        if accumulate:
            streams.h2d.wait_event(chunk.offloaded)
        for part, slices in in_parts(run.slices, self._sum_elements):
            buffer = self._sums[0]
            self._sums.rotate(-1)
            here, home = buffer.memory[: part.stop - part.start], total[part]
            if accumulate:
                with span(UP, f"sum {chunk.index}"):
                    streams.upload(here, home, after=buffer.free, done=buffer.there)
            streams.reduce.wait_event(buffer.there if accumulate else buffer.free)
            self._fold(chunk, pieces[:, part], slices, target[part], here, accumulate=accumulate)
            with span(DOWN, f"sum {chunk.index}"):
                streams.offload(home, here, after=self.added, done=buffer.free)
        streams.d2h.record_event(chunk.offloaded)
        streams.reduce.record_event(lane.shard_free)

    def _fold(
        self,
        chunk: Chunk,
        pieces: Tensor,
        slices: Sequence[Slice],
        target: Tensor,
        total: Tensor | None,
        *,
        accumulate: bool,
    ) -> None:
        with self._streams.running(self._streams.reduce, after=self._filled, done=self.added):
            if total is not None and not accumulate:
                total.fill_(ABSENT)
            squares, factor = self._squares, chunk.sum_factor
            fold(pieces, slices, gradient=target, accumulator=total, factor=factor, partials=squares.partials)
            squares.keep_cut_tiles(slices, target)

    def send(self, chunk: Chunk) -> None:
        """Round what was added to the sum of ``chunk`` on the device, if it has one, and copy it to host memory."""
        if chunk not in self._unsent:
            return
        ranges = [slice(*each) for each in sorted(self._unsent.pop(chunk))]
        streams, lane = self._streams, self._lane(chunk)
        assert chunk.accumulator is not None
        streams.compute.record_event(self._filled)
        streams.reduce.wait_event(lane.shard_free)
        with streams.running(streams.reduce, after=self._filled, done=self.added):
            for part in ranges:
                torch.mul(chunk.accumulator[part], chunk.sum_factor, out=lane.shard[part])
        self._offload(chunk, lane, ranges, after=self.added)

    def send_all(self) -> None:
        """``send`` every chunk, and ``settle``."""
        for chunk in list(self._unsent):
            self.send(chunk)
        self.settle()

    def settle(self) -> None:
        """Let the compute stream wait for all additions. Until then it does what follows in the model beside them."""
        self._streams.compute.wait_event(self.added)

    def combine_squares(self) -> None:
        """Make all sums of squares known to this rank. All ranks call it when their gradients are reduced."""
        self._streams.compute.record_event(self._filled)
        with self._streams.running(self._streams.reduce, after=self._filled, done=self.added):
            self._squares.combine()

    def reset(self) -> None:
        """Forget what was not sent, as all gradients are forgotten."""
        self.settle()  # what is added on the other stream must not come later
        self._unsent.clear()

    def _note(self, chunk: Chunk, ranges: Sequence[slice]) -> None:
        """Record that gradients were added to ``ranges`` of the sum of ``chunk``, which lies on the device."""
        self._unsent.setdefault(chunk, set()).update((part.start, part.stop) for part in ranges)

    def _offload(self, chunk: Chunk, lane: Lane, ranges: Sequence[slice], *, after: Event) -> None:
        """Copy ``ranges`` of ``lane.shard`` to the gradient in host memory."""
        chunk.wait()  # an update may read the target, if no forward has come in between
        assert chunk.grad is not None
        for part in ranges:
            with span(DOWN, f"gradients {chunk.index}"):
                self._streams.offload(chunk.grad[part], lane.shard[part], after=after, done=chunk.offloaded)
        self._streams.d2h.record_event(lane.shard_free)

    def _lane(self, chunk: Chunk) -> Lane:
        """The lane of the next gradient of ``chunk``."""
        if chunk.large:
            return self._large
        self._usual.rotate(-1)
        return self._usual[0]

    def _free_lane(self, chunk: Chunk) -> Lane:
        """``_lane``, whose ``sent`` the compute stream may fill."""
        lane = self._lane(chunk)
        self._streams.compute.wait_event(lane.sent_free)
        if self._poison:
            lane.sent.fill_(float("nan"))
        return lane

    def _placed(self, members: tuple[Member, ...]) -> _Run:
        chunk, shard = members[0].chunk, members[0].chunk.shard
        start, stop, length = members[0].offset, members[-1].stop, chunk.shard_elements
        bounds = [(rank * length, (rank + 1) * length) for rank in range(self._ranks.size)]
        counts = tuple(max(0, min(stop, high) - max(start, low)) for low, high in bounds)
        first = max(start, shard.start) - shard.start
        parts = [(member, local_elements(member)) for member in members]
        slices = tuple(
            Slice(
                offset=member.shard_slice.start - first,
                numel=part.stop - part.start,
                first=part.start,
                parameter_numel=member.numel,
                partial_offset=self._squares.offsets[member.index],
            )
            for member, part in parts
            if part.start < part.stop
        )
        return _Run(counts, slice(first, first + counts[self._ranks.rank]), slices)


def runs(members: Sequence[Member]) -> list[list[Member]]:
    """``members`` of one chunk, sorted by offset, in runs of neighbours."""
    found: list[list[Member]] = []
    for member in members:
        if found and found[-1][-1].stop == member.offset:
            found[-1].append(member)
        else:
            found.append([member])
    return found


class SquareSums:
    """The partial sums of squares of all trainable parameters, on the device.

    Args:
        memory: where they are allocated.
        members: all managed parameters.
        cut_tiles: the tiles that shards cut, as (parameter, tile of it).
    """

    def __init__(self, memory: EngineMemory, members: list[Member], cut_tiles: Sequence[tuple[int, int]]) -> None:
        self._tiles = {member.index: tiles(member.numel) for member in members if member.group >= 0}
        *starts, n_tiles = itertools.accumulate(self._tiles.values(), initial=0)
        self.offsets = dict(zip(self._tiles, starts, strict=True))  # where the partial sums of a parameter begin
        self.partials = memory.zeros(n_tiles, dtype=torch.float32)
        self.norms: dict[int, Tensor] = {}  # of each gradient by parameter, while no other gradient comes
        self._ranks = memory.ranks
        cut = [self.offsets[parameter] + tile for parameter, tile in cut_tiles]
        self._row_of_cut = {partial: row for row, partial in enumerate(cut)}
        self._cut_partials_on_device = torch.tensor(cut, dtype=torch.int64, device=memory.device)
        self._cut = memory.zeros(len(cut), TILE)
        # The sums of all ranks. ``partials`` stay those of this rank, to which another backward may add.
        self._all = memory.zeros(n_tiles, dtype=torch.float32) if memory.ranks.several else self.partials
        self._all_cut = memory.zeros(len(cut), TILE)
        self._cut_sums = memory.streams.record_streams(torch.zeros(len(cut), dtype=torch.float32, device=memory.device))

    def reset(self) -> None:
        """Forget all gradients."""
        self.norms.clear()
        self.partials.zero_()
        self._cut.zero_()

    def forget(self, index: int) -> None:
        """Forget the gradient of parameter ``index``, on all ranks alike."""
        self.norms.clear()
        first = self.offsets[index]
        for sums in (self.partials, self._all):
            sums[first : first + self._tiles[index]].zero_()
        for partial, row in self._row_of_cut.items():
            if first <= partial < first + self._tiles[index]:
                self._cut[row].zero_()

    def keep_cut_tiles(self, slices: Sequence[Slice], values: Tensor) -> None:
        """Keep what ``values``, the reduced gradients of ``slices``, has of cut tiles. See [Note: cut tiles]."""
        for part in slices:
            ends = {part.first // TILE, tiles(part.stop) - 1} if part.numel else set()
            for tile in (tile for tile in ends if tile not in part.whole_tiles):
                begin, stop = max(part.first, tile * TILE), min(part.stop, (tile + 1) * TILE)
                row = self._cut[self._row_of_cut[part.partial_offset + tile]]
                row[begin - tile * TILE : stop - tile * TILE].copy_(
                    values[part.offset + begin - part.first : part.offset + stop - part.first]
                )

    def combine(self) -> None:
        """Make all sums known to this rank. All ranks call it when their gradients are reduced."""
        self.norms.clear()
        self._all.copy_(self.partials)
        self._ranks.add_disjoint(self._all, "the norm of the gradients")
        if self._row_of_cut:
            self._all_cut.copy_(self._cut)
            self._ranks.add_disjoint(self._all_cut, "the norm of the gradients")
            # The values stay where they are, and are summed up.
            flatten([self._all_cut], self._all_cut.view(-1), [0], self._cut_sums, [0])
            self._all[self._cut_partials_on_device] = self._cut_sums

    def total(self) -> Tensor:
        """The sum of squares of all gradients: fp64, 0-d, on the device."""
        return self._all.double().sum()

    def norm_of(self, index: int) -> Tensor:
        """The 2-norm of the gradient of parameter ``index``: fp32, 0-d, on the device."""
        if not self.norms:
            # All norms are computed at once in a few launches. One launch per parameter would take milliseconds.
            parts = self._all.double().split(list(self._tiles.values()))  # the 1-norm of squares is their sum
            norms = torch.stack(torch._foreach_norm(parts, 1)).sqrt().float()
            self.norms.update(zip(self._tiles, norms.unbind(), strict=True))
        return self.norms[index]
