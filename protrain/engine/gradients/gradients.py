"""Gradients: from autograd into chunks, to host memory, summed over several backwards, and their norm.

A hook takes each gradient as soon as autograd has finished it. When backward leaves a unit, the gradients of the unit
are flattened into their chunks. Those of a persistent chunk go into its gradient; all others go into one of two staging
buffers and from there to host memory. The same pass over the data yields the sums of squares of each tile of a
parameter. Their order depends on nothing but the parameter, so the norm has the same bits under every plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.gradients.host_gradients import HostGradients, Ranges
from protrain.engine.gradients.norm import SquareSums
from protrain.engine.gradients.pool import GradientPools
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.units import ManagedModel
from protrain.engine.updates.worker import HostWorker
from protrain.engine.weights.parameter import take_gradient
from protrain_kernels import AdamScalars, flatten


class Settings(NamedTuple):
    """What must be the same on all ranks, so that they update their shards alike."""

    scalars: list[AdamScalars] | None  # the hyperparameters of each group; None: some are invalid
    texts: list[dict[str, str]]  # the same as the user has set them
    factor: float | None  # on the gradients of the last step, as of clipping


class Gradients:
    """Collects the gradients of one step; reset by ``zero_grad``.

    Args:
        managed: the model.
        worker: adds gradients in host memory.
    """

    def __init__(self, managed: ManagedModel, *, worker: HostWorker) -> None:
        memory, members = managed.memory, managed.members
        self.members = members
        self.device, self.dtype = memory.device, memory.dtype
        self.pending: dict[Chunk, list[tuple[Member, Tensor]]] = {}
        self.present = [False] * len(members)  # whether a parameter has got a gradient since zero_grad
        self.forgotten: set[int] = set()  # present gradients whose .grad was set to None
        self.no_sync = False  # the current backward runs inside model.no_sync()
        self.delivered: set[int] = set()  # members whose gradients have arrived in this backward
        self.squares = SquareSums(memory, members, managed.layout.cut_tiles())
        self.pools = GradientPools(managed)
        self.host_gradients = HostGradients(managed, self.pools, worker)
        self._poison = memory.poison

    def is_pending(self, index: int) -> bool:
        """Whether parameter ``index`` has a gradient whose .grad was not set to None."""
        stored = self.present[index] and index not in self.forgotten
        return stored or any(member.index == index for items in self.pending.values() for member, _ in items)

    def indices(self) -> set[int]:
        """The indices of the parameters that have a gradient."""
        return {index for index, present in enumerate(self.present) if present} - self.forgotten

    def begin_backward(self) -> None:
        """A backward begins, which may bring gradients. This is called inside it."""
        self.delivered.clear()

    def collect(self, member: Member, gradient: Tensor | None) -> None:
        """Keep the gradient of ``member`` that autograd has just finished, until ``flush``."""
        if gradient is not None and member.group >= 0:
            self.pending.setdefault(member.chunk, []).append((member, gradient.detach()))  # of create_graph=True

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
                self.host_gradients.make_accumulator(chunk, begun=self.has_gradients(chunk))
            self._store(chunk, first, accumulate=False)
            self._store(chunk, again, accumulate=True)
            for member, _ in items:
                self.present[member.index] = True
                self.delivered.add(member.index)
        return touched

    def refuse_backward(self) -> None:
        """MisuseError if no other backward may come."""

    def has_gradients(self, chunk: Chunk) -> bool:
        """Whether any parameter of ``chunk`` has a gradient."""
        return any(self.present[index] for index in chunk.parameters)

    def has_all(self, chunk: Chunk) -> bool:
        """Whether this backward has brought a gradient to every parameter of ``chunk``, on this rank."""
        return all(index in self.delivered for index in chunk.parameters)

    def agree(self, chunk: Chunk) -> bool:
        """Make known to all ranks which parameters of ``chunk`` have a gradient on any of them.

        Returns whether the chunk may be updated inside this backward: one rank must have all of its gradients. Several
        ranks know that no visit brings more, so the parameters that have a gradient must have got one in this backward.
        """
        return self.has_all(chunk)

    def combine(self, settings: Callable[[], Settings]) -> None:
        """All ranks have reduced their gradients of a backward: make known to each who has one, and the norm.

        Args:
            settings: returns those of this rank, which must be those of all. With one rank nobody asks for them.

        Raises:
            MisuseError: it is not the same, or a gradient came too late to be reduced.
        """

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
        self.pools.release_all()
        self.pending.clear()
        self.present = [False] * len(self.members)
        self.forgotten.clear()
        self.squares.reset()

    def _accumulates(self, chunk: Chunk, *, again: bool) -> bool:
        """Whether ``chunk`` needs an accumulator now. ``again`` tells whether one of its parameters has a gradient."""
        if self.pools.of(chunk) is not None:
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
                self.pools.acquire(chunk)
            where = offsets, squares, tile_offsets
            flatten(gradients, chunk.gradient, *where, accumulate=accumulate, weight_dtype=self.dtype)
            return
        staging, drained = self.host_gradients.staging(chunk)
        if self._poison:
            staging.fill_(float("nan"))
        flatten(gradients, staging, offsets, squares, tile_offsets, accumulate=False)
        self.host_gradients.send(chunk, _merged(members), staging, drained, accumulate=accumulate)


def _merged(members: list[Member]) -> Ranges:
    """The ranges of elements that cover ``members``, which are sorted by offset, and their padding."""
    ranges: Ranges = []
    for member in members:
        if ranges and ranges[-1][1] == member.offset:
            ranges[-1] = (ranges[-1][0], member.stop)
        else:
            ranges.append((member.offset, member.stop))
    return ranges
