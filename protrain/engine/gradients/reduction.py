"""Gradients of several ranks: from each rank's backward to the shards that the ranks own (design: ZeRO-3).

When backward leaves a visit of a unit, the ranges of chunks whose gradients are complete by then are reduced:

    flatten      this rank's gradients of the range go into a buffer to send; a parameter without one sends -0.0
    exchange     every rank receives, from all ranks, what belongs to its own shard (an all_to_all)
    fold         the pieces are added in rank order in fp32, multiplied by the factor of a mean, and rounded once
    offload      the shard's gradient of a chunk in host memory goes there

In a step of several backwards the fold adds to the fp32 sum of the earlier ones: see [Note: sums] in
``protrain.engine.gradients.host_gradients``.

An addition of -0.0 changes no value, so a rank without a gradient is left out of the sum. The exchange and the fold run
on the stream of reductions, under the backward of the next unit.

[Note: order of reductions] All ranks must issue the same collectives in the same order. So which ranges are reduced
after which visit follows from the order of calls in the profile alone, and a rank that skips a unit reduces nothing in
its place but takes part. A parameter is reduced after the last visit, in the order of backward, of all units that use
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.gradients.gradients import Settings, runs
from protrain.engine.gradients.host_gradients import ABSENT, HostGradients
from protrain.engine.gradients.norm import SquareSums
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.streams import span
from protrain.engine.units import ManagedModel, Unit
from protrain.planning.timeline import REDUCE
from protrain_kernels import Slice, flatten


@dataclass(frozen=True, eq=False)
class _Range:
    """Neighbouring parameters of a chunk whose gradients are complete after the same visit."""

    chunk: Chunk
    start: int  # elements of the whole chunk
    stop: int
    members: tuple[Member, ...]
    counts: tuple[int, ...]  # the elements of it in the shard of each rank
    own: slice  # the elements of it in this rank's shard, in the chunk's states
    slices: tuple[Slice, ...]  # the parameters in ``own``


class Reduction:
    """Reduces the gradients of every backward."""

    def __init__(self, managed: ManagedModel, squares: SquareSums, host_gradients: HostGradients) -> None:
        memory = managed.memory
        self._ranks = memory.ranks
        self._streams = memory.streams
        self._poison = memory.poison
        self._squares = squares
        self._host_gradients = host_gradients
        self._ranges = self._plan(managed.units, managed.profile.calls)
        last = {part.chunk: visit for visit, parts in self._ranges.items() for part in parts}
        self._complete: dict[int, list[Chunk]] = {}  # by the last visit after which something of them is reduced
        for chunk, visit in last.items():
            self._complete.setdefault(visit, []).append(chunk)
        usual, large = managed.layout.reduction_elements()
        self._received = {  # used on the stream of reductions alone, in order
            kind: memory.zeros(elements) for kind, elements in ((False, usual), (True, large))
        }
        self._filled = memory.streams.mark()

    def reduce(self, visit: int, gradients: dict[int, Tensor], *, again: bool) -> list[Chunk]:
        """Reduce what is complete after ``visit`` of the schedule, and take it out of ``gradients``, by parameter.

        With ``again`` it is added to what earlier backwards of the step have brought, where there are accumulators.

        Returns:
            The chunks whose gradients are complete now, on all ranks.
        """
        for part in self._ranges.get(visit, ()):
            self._reduce(part, gradients, again=again)
        return self._complete.get(visit, [])

    def chunks(self, visit: int) -> list[Chunk]:
        """The chunks of which something is reduced after ``visit``."""
        return [part.chunk for part in self._ranges.get(visit, ())]

    def _reduce(self, part: _Range, gradients: dict[int, Tensor], *, again: bool) -> None:
        streams, chunk, lanes = self._streams, part.chunk, self._host_gradients
        lane = lanes.lane(chunk)
        streams.compute.wait_for(lane.sent_free)
        sent = lane.sent[: part.stop - part.start]
        present = [member for member in part.members if member.index in gradients]
        if len(present) < len(part.members):
            sent.fill_(ABSENT)
        elif self._poison:
            sent.fill_(float("nan"))
        flatten(
            [gradients.pop(member.index).contiguous() for member in present],
            sent,
            [member.offset - part.start for member in present],
        )
        streams.compute.place(self._filled)
        own = part.own.stop - part.own.start
        received = self._received[chunk.large][: own * self._ranks.size]
        running = streams.reduce.running(after=self._filled, done=lane.sent_free)
        with span(REDUCE, f"reduce {chunk.index}"), running:
            self._ranks.exchange(received, sent, part.counts, f"the reduction of chunk {chunk.index}")
        if not own:
            return
        pieces = received.view(self._ranks.size, own)
        if chunk.persistent and chunk.accumulator is None:
            assert chunk.grad is not None
            target = chunk.grad[part.own]
        else:
            target = lane.shard[:own]
        lanes.add(chunk, lane, part.own, pieces, part.slices, target=target, again=again)
        with streams.reduce.running(after=lanes.added, done=lanes.added):
            self._squares.keep_cut_tiles(part.slices, target)

    def _plan(self, units: Sequence[Unit], calls: Sequence[int]) -> dict[int, list[_Range]]:
        """The ranges that are reduced after each visit of the schedule. See [Note: order of reductions]."""
        visits = [*calls, *reversed(calls)]
        last: dict[Member, int] = {}
        for visit in range(len(calls), len(visits)):
            for member in units[visits[visit]].members:
                if member.group >= 0:
                    last[member] = visit
        found: dict[int, list[_Range]] = {}
        for visit in sorted(set(last.values())):
            members = sorted(
                (member for member, at in last.items() if at == visit),
                key=lambda member: (member.chunk.index, member.offset),
            )
            found[visit] = [self._range(run) for run in runs(members)]
        return found

    def _range(self, members: Sequence[Member]) -> _Range:
        chunk = members[0].chunk
        start, stop = members[0].offset, members[-1].stop
        length = chunk.shard_elements
        bounds = [(rank * length, (rank + 1) * length) for rank in range(self._ranks.size)]
        counts = tuple(max(0, min(stop, high) - max(start, low)) for low, high in bounds)
        first = max(start, chunk.shard.start) - chunk.shard.start
        own = slice(first, first + counts[self._ranks.rank])
        slices = []
        for member in members:
            begin = max(member.own.start, own.start)
            if member.own.start == member.own.stop:
                continue
            inside = begin + chunk.shard.start - member.offset  # the element of the parameter
            slices.append(
                Slice(
                    offset=begin - own.start,
                    numel=min(member.numel - inside, member.own.stop - begin),
                    first=inside,
                    parameter_numel=member.numel,
                    partial_offset=self._squares.offsets[member.index],
                )
            )
        return _Range(chunk, start, stop, tuple(members), counts, own, tuple(slices))


def refuse_late(late: Sequence[str]) -> None:
    """MisuseError if a gradient came after the visit at which all ranks reduce it. ``late`` names one of each rank."""
    name = next((name for name in late if name), None)
    if name is not None:
        raise MisuseError(
            f"the gradient of {name} came when all ranks had reduced it, or in a unit that the profiled step did not "
            "call: pass an example_batch to protrain.wrap with which the model runs as it will be trained, and compute "
            "a term of the loss that is made of weights after the forward"
        )


def refuse_other_settings(of_ranks: Sequence[Settings]) -> None:
    """MisuseError on every rank if the ranks have other hyperparameters, or clipped otherwise in the last step."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        if other.scalars != first.scalars:
            differing = [
                f"{name} of group {index} is {theirs[name]}, not {value}"
                for index, (ours, theirs) in enumerate(zip(first.texts, other.texts, strict=False))
                for name, value in ours.items()
                if theirs[name] != value
            ] or [f"{len(other.texts)} groups, not {len(first.texts)}"]
            raise MisuseError(
                f"rank {rank} has other hyperparameters than rank 0 ({'; '.join(differing)}): set the same ones in "
                "every process"
            )
        # Clipping of torch and of the optimizer may differ in the last place of the norm.
        factors = [math.nan if each.factor is None else each.factor for each in (first, other)]
        if not math.isclose(*factors, rel_tol=1e-4) and not all(map(math.isnan, factors)):
            raise MisuseError(
                f"in the last step rank {rank} multiplied gradients by {factors[1]:.4g} and rank 0 by "
                f"{factors[0]:.4g}, so they have updated their parts of the model differently: clip to the same norm "
                "in every process, and resume from a checkpoint"
            )
