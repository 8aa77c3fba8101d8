"""The gradients of one of several ranks: reduced after each visit of backward, and known to all ranks at its end.

Gradients wait until backward leaves the visit after which all ranks reduce them. ``Reduction`` then brings the
rank's shard of the reduced gradients into chunks. At the end of every backward the ranks tell each other which
parameters have a gradient, and exchange the partial sums of the norm. So clipping and updates are local afterwards.

A backward that brings no gradients of parameters, as that of torch.autograd.grad, must leave those that are there, and
a reduction would replace them. So no rank reduces anything in it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch import Tensor
from typing_extensions import override

from protrain.engine.gradients.gradients import Gradients, Settings
from protrain.engine.gradients.reduction import Reduction, refuse_late, refuse_other_settings
from protrain.engine.states.chunks import Chunk
from protrain.engine.units import ManagedModel
from protrain.engine.weights.parameter import receives_gradient


class ShardedGradients(Gradients):
    """Collects the gradients of one step on one of several ranks."""

    def __init__(self, managed: ManagedModel) -> None:
        super().__init__(managed)
        self._ranks = managed.memory.ranks
        self._filled = self._streams.mark()  # the squares of this rank are complete
        self._reduction = Reduction(managed, self.squares, self.host_gradients)
        self._is_sum = False  # whether a backward of this step has been reduced
        self._brings = True  # whether the backward that runs, or has failed, still brings gradients
        self._waiting: dict[int, Tensor] = {}  # gradients that wait for their reduction, by parameter

    @override
    def is_pending(self, index: int) -> bool:
        return index in self._waiting or super().is_pending(index)

    @override
    def abandon(self) -> None:
        self._waiting.clear()
        self._brings = False  # the visits that are left of it bring none, and update nothing
        super().abandon()

    @override
    def reset(self) -> None:
        self._waiting.clear()
        self._is_sum = False
        super().reset()

    @override
    def begin_backward(self) -> None:
        super().begin_backward()
        self._brings = any(receives_gradient(member.parameter) for member in self.members if member.group >= 0)
        if not self._brings:
            self._ranks.note("a backward without gradients of parameters")

    @override
    def flush(self, visit: int) -> list[Chunk]:
        """Reduce, with all ranks, what is complete after ``visit``. Returns the chunks that are complete now."""
        if not self._brings:
            return []
        for member, gradient in chain.from_iterable(self.pending.values()):
            known = self._waiting.get(member.index)
            self._waiting[member.index] = gradient if known is None else known + gradient
        self.pending.clear()
        for chunk in self._reduction.chunks(visit):
            if chunk.accumulator is None:
                self.pools.acquire(chunk)
        before = set(self._waiting)
        complete = self._reduction.reduce(visit, self._waiting, again=self._is_sum)
        for index in before.difference(self._waiting):
            self.present[index] = True
            self.delivered.add(index)
        if self.is_last:
            for chunk in complete:
                self.host_gradients.send(chunk)
        return complete

    @override
    def agree(self, chunk: Chunk) -> bool:
        known = [(self.present[index], index in self.delivered) for index in chunk.parameters]
        every = self._ranks.all_values(known, f"whether chunk {chunk.index} has gradients")
        brought = []
        for index, *of_ranks in zip(chunk.parameters, *every, strict=True):
            self.present[index], now = map(any, zip(*of_ranks, strict=True))
            brought.append(now or not self.present[index])
        return all(brought)

    @override
    def combine(self, settings: Callable[[], Settings]) -> None:
        late = self.members[min(self._waiting)].name if self._waiting else ""
        requests = self._ranks.requests
        value = (settings(), late, bytes(self.present), requests.received)
        every = self._ranks.all_in_step(value, "the end of a backward")
        refuse_late([late for _, late, *_ in every])
        refuse_other_settings([of_rank for of_rank, *_ in every])
        requests.of_all = max(received for *_, received in every)
        if not self._brings:
            return
        self._is_sum = True
        self.present = [any(flags) for flags in zip(*(present for *_, present, _ in every), strict=True)]
        self._streams.compute.place(self._filled)
        with self._streams.reduce.running(after=self._filled, done=self.host_gradients.added):
            self.squares.combine()
        super().combine(settings)
