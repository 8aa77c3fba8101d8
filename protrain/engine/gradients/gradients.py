"""Gradients: from autograd into chunks, to host memory, summed over several backwards, and their norm.

A hook takes each gradient as soon as autograd has finished it. When backward leaves a unit, the gradients of the unit
are flattened into their chunks: into a gradient or a sum on the device, or into a lane and from there to host memory
(``protrain.engine.gradients.host_gradients``). The same pass over the data yields the sums of squares of each tile of a
parameter. Their order depends on nothing but the parameter, so the norm has the same bits under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.gradients.host_gradients import HostGradients
from protrain.engine.gradients.norm import SquareSums
from protrain.engine.gradients.pool import GradientPools
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.units import ManagedModel
from protrain.engine.weights.parameter import take_gradient
from protrain_kernels import AdamScalars, Slice, flatten


class Settings(NamedTuple):
    """What must be the same on all ranks, so that they update their shards alike."""

    scalars: list[AdamScalars] | None  # the hyperparameters of each group; None: some are invalid
    texts: list[dict[str, str]]  # the same as the user has set them
    factor: float | None  # on the gradients of the last step, as of clipping


class Gradients:
    """Collects the gradients of one step; reset by ``zero_grad``.

    Args:
        managed: the model.
    """

    def __init__(self, managed: ManagedModel) -> None:
        memory, members = managed.memory, managed.members
        self.members = members
        self.device, self.dtype = memory.device, memory.dtype
        self.pending: dict[Chunk, list[tuple[Member, Tensor]]] = {}
        self.present = [False] * len(members)  # whether a parameter has got a gradient since zero_grad
        self.forgotten: set[int] = set()  # present gradients whose .grad was set to None
        self._zeroed: set[int] = set()  # parameters for which zero_grad(set_to_none=False) leaves zeros in torch
        self.no_sync = False  # the current backward runs inside model.no_sync()
        self.delivered: set[int] = set()  # members whose gradients have arrived in this backward
        self.squares = SquareSums(memory, members, managed.layout.cut_tiles())
        self.pools = GradientPools(managed)
        self.host_gradients = HostGradients(managed, self.squares.partials)
        self._streams, self._poison = memory.streams, memory.poison
        self._accumulation = managed.plan.accumulation
        self.backwards = 0  # of the step, that bring gradients, without those that have failed
        self._counts = False  # whether the current backward is among them

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
        self._counts = False

    def collect(self, member: Member, gradient: Tensor | None) -> None:
        """Keep the gradient of ``member`` that autograd has just finished, until ``flush``."""
        if gradient is not None and member.group >= 0:
            self.pending.setdefault(member.chunk, []).append((member, gradient.detach()))  # of create_graph=True

    def abandon(self) -> None:
        """Drop the gradients that a failed backward has brought and no ``flush`` has stored."""
        self.pending.clear()
        self.backwards, self._counts = self.backwards - self._counts, False
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
            if again and chunk.accumulator is None:
                raise _one_more(f"a second gradient of {again[0][0].name}", 2)
            self._store(chunk, first, accumulate=False)
            self._store(chunk, again, accumulate=True)
            for member, _ in items:
                self.present[member.index] = True
                self.delivered.add(member.index)
            if self.is_last and self.has_all(chunk):
                self.host_gradients.send(chunk)
        return touched

    @property
    def is_last(self) -> bool:
        """Whether this is the last backward that the plan has for a step."""
        return self.backwards == self._accumulation

    def count_backward(self) -> None:
        """Another backward brings gradients. MisuseError if it is one more than planned."""
        begins = self.no_sync and not self.backwards  # a sum, as another backward follows
        if self.backwards + begins >= self._accumulation:
            what = "a backward() under model.no_sync()" if begins else "another backward()"
            raise _one_more(what, self.backwards + begins + 1)
        self.backwards, self._counts = self.backwards + 1, True

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
        """All gradients of a backward are in chunks. Several ranks make known to each other who has one, and the norm.

        Args:
            settings: returns those of this rank, which must be those of all. With one rank nobody asks for them.

        Raises:
            MisuseError: it is not the same, or a gradient came too late to be reduced.
        """
        if self.is_last:
            self.host_gradients.settle()

    def forget(self, index: int) -> bool:
        """The user has set ``.grad`` of parameter ``index`` to None. Returns whether this was the last gradient."""
        if not self.present[index]:
            raise MisuseError(
                f"backward is just computing the gradient of {self.members[index].name}: set it to None when "
                "backward is over, or in a hook that is registered before protrain.wrap"
            )
        self.forgotten.add(index)
        return not self.pending and len(self.forgotten) == sum(self.present)

    def refuse_missing(self, what: str, index: int | None = None) -> None:
        """Raise a MisuseError if the gradients that ``what`` needs are missing.

        With ``index`` it needs the gradient of that parameter. In any case it also raises if some gradients were set to
        None and others were not.
        """
        members, present, forgotten = self.members, self.present, self.forgotten
        if not (any(present) if index is None else present[index]):
            name = "gradients" if index is None else f"the gradient of {members[index].name}"
            raise MisuseError(f"{what} without {name}: call loss.backward() first")
        if forgotten:
            raise MisuseError(
                f"{what} after .grad of {len(forgotten)} parameters was set to None, of "
                f"{members[min(forgotten)].name} among them, and that of others was not: clear all of them "
                "with optimizer.zero_grad(), and set requires_grad=False for parameters that are not to be trained"
            )

    def refuse_zeros(self) -> None:
        """MisuseError if torch would now update a parameter by zeros, which zero_grad(set_to_none=False) leaves there.

        Adam moves such a parameter on by its momentum and its weight decay, and no zeros are kept here.
        """
        for index in sorted(self._zeroed):
            if not self.present[index]:
                raise MisuseError(
                    f"no backward() has reached {self.members[index].name} in this step, and "
                    "zero_grad(set_to_none=False) would leave it a gradient of zeros, by which Adam moves it on. "
                    "ProTrain keeps no such gradients: call zero_grad() without set_to_none=False, so that parameters "
                    "without a gradient stay as they are"
                )

    def expect_zeros(self, zeros: bool) -> None:
        """``zero_grad`` is called. With ``zeros`` the script expects zeros in place of the gradients."""
        self._zeroed = self._zeroed | self.indices() if zeros else set()

    def reset(self) -> None:
        """Forget every gradient (``zero_grad``)."""
        self.pools.release_all()
        self.host_gradients.reset()
        self.backwards, self._counts = 0, False
        self.pending.clear()
        self.present = [False] * len(self.members)
        self.forgotten.clear()
        self.squares.reset()

    def _store(self, chunk: Chunk, items: list[tuple[Member, Tensor]], *, accumulate: bool) -> None:
        if not items:
            return
        members, lanes = [member for member, _ in items], self.host_gradients
        gradients = [gradient.contiguous() for _, gradient in items]
        offsets = [member.offset for member in members]
        where = offsets, self.squares.partials, [self.squares.offsets[member.index] for member in members]
        on_device = chunk.accumulator is not None and not chunk.accumulator_on_host
        self.pools.acquire(chunk)
        if on_device or chunk.persistent:
            target = chunk.accumulator if on_device else chunk.grad
            assert target is not None
            flatten(gradients, target, *where, accumulate=accumulate, weight_dtype=self.dtype)
            if not chunk.persistent:
                lanes.note(chunk, [slice(run[0].offset, run[-1].stop) for run in runs(members)])
            return
        lane = lanes.lane(chunk)
        self._streams.compute.wait_for(lane.shard_free)
        if self._poison:
            lane.shard.fill_(float("nan"))
        if chunk.accumulator is None:
            flatten(gradients, lane.shard, *where)
            lanes.offload(chunk, lane, [slice(run[0].offset, run[-1].stop) for run in runs(members)])
            return
        flatten(gradients, lane.shard, offsets)
        for run in runs(members):
            own = slice(run[0].offset, run[-1].stop)
            part = lane.shard[own]
            lanes.add(chunk, lane, own, part[None], self._slices(run), target=part, again=accumulate)

    def _slices(self, run: Sequence[Member]) -> tuple[Slice, ...]:
        """The whole parameters of ``run``, whose range begins with the first of them."""
        return tuple(
            Slice(
                offset=member.offset - run[0].offset,
                numel=member.numel,
                first=0,
                parameter_numel=member.numel,
                partial_offset=self.squares.offsets[member.index],
            )
            for member in run
        )


def _one_more(what: str, needed: int) -> MisuseError:
    """The error for gradients that come when all that were planned are there."""
    return MisuseError(
        f"{what} in a step, for whose sum in fp32 this plan has no memory: pass accumulation={needed} or more to "
        "protrain.wrap, the most backward() calls that a step will have. Otherwise call "
        "optimizer.zero_grad() after each step(), and backward() once on the sum of several losses. Under no_sync() no "
        "process trains weights of its own, as LocalSGD lets it, because each has a part of one model"
    )


def runs(members: Sequence[Member]) -> list[list[Member]]:
    """``members``, sorted by chunk and offset, in runs of neighbours."""
    found: list[list[Member]] = []
    for member in members:
        if found and found[-1][-1].chunk is member.chunk and found[-1][-1].stop == member.offset:
            found[-1].append(member)
        else:
            found.append([member])
    return found
