"""The gradients of one step: who has one, when they go into chunks, and what all ranks must know of them.

A hook takes each gradient as soon as autograd has finished it. When backward leaves a unit, the gradients that are
complete go into their chunks (``protrain.engine.gradients.reduction``). The same pass over the data yields the sums of
squares of each tile of a parameter. Their order depends on nothing but the parameter, so the norm has the same bits
under every plan.

[Note: order of reductions] With one rank a gradient is complete when it has arrived. Several ranks reduce gradients
together, and must issue the same collectives in the same order. So which ones are reduced after which visit follows
from the order of calls in the profile alone, and a rank that skips a unit sends nothing in its place but takes part. A
parameter is reduced after the last visit, in the order of backward, of all units that use it.

At the end of every backward the ranks tell each other which parameters have a gradient, and exchange the partial sums
of the norm. So clipping and updates are local afterwards. A backward that brings no gradients of parameters, as that of
torch.autograd.grad, must leave those that are there, and a reduction would replace them. So no rank reduces anything in
it.

[Note: shared memory] While updates run inside backward, chunks share memory for gradients. A buffer here is what the
planner calls a region (``protrain.planning.gradient_regions``), and a plan has ``n_device_gradient`` and
``n_host_gradient`` of them. A chunk needs its gradient from when that arrives until the chunk is updated. Inside
backward this is a short time, so in place of two bytes for every parameter a few buffers of one chunk each suffice. A
chunk acquires a buffer for its first gradient and releases it when its update is queued. On the device the stream keeps
the order of uses. In host memory the next chunk waits until the update is done. Where parameters get no gradient, more
chunks than planned may have a buffer at once, as their updates come when backward ends. Then more buffers are
allocated, as far as memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from protrain.common.errors import MisuseError, PlanError
from protrain.engine.gradients.reduction import Reduction, SquareSums
from protrain.engine.states.arena import whole_pages
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.units import ManagedModel
from protrain.engine.weights.parameter import receives_gradient, take_gradient


class Settings(NamedTuple):
    """What must be the same on all ranks, so that they update their shards alike."""

    options: list[dict[str, Any]]  # the hyperparameters of each group
    factor: float  # on the gradients of the last step, as of clipping


class Gradients:
    """Collects the gradients of one step; reset by ``zero_grad``.

    Args:
        managed: the model.
    """

    def __init__(self, managed: ManagedModel) -> None:
        memory, members = managed.memory, managed.members
        self.members = members
        self.device = memory.device
        self._ranks = memory.ranks
        self.pending: dict[int, Tensor] = {}  # finished gradients that wait for ``flush``, by parameter
        self.present = [False] * len(members)  # whether a parameter has got a gradient since zero_grad
        self._zeroed: set[int] = set()  # parameters for which zero_grad(set_to_none=False) leaves zeros in torch
        self.delivered: set[int] = set()  # members whose gradients have arrived in this backward
        self.squares = SquareSums(memory, members, managed.layout.cut_tiles())
        self.pools = GradientPools(managed)
        self.reduction = Reduction(managed, self.squares)
        # Several ranks know which parameters each visit completes: [Note: order of reductions].
        self._complete = _completed(managed) if memory.ranks.several else {}
        self._last_visit = {member.chunk: visit for visit, found in self._complete.items() for member in found}
        self._accumulation = managed.plan.accumulation
        self.backwards = 0  # of the step, that bring gradients, without those that have failed
        self._counts = False  # whether the current backward is among them
        self._brings = True  # whether the backward that runs, or has failed, still brings gradients

    def indices(self) -> set[int]:
        """The indices of the parameters that have a gradient."""
        return {index for index, present in enumerate(self.present) if present}

    def begin_backward(self) -> None:
        """A backward begins, which may bring gradients. This is called inside it."""
        self.delivered.clear()
        self._counts = False
        self._brings = not self._ranks.several or any(
            receives_gradient(member.parameter) for member in self.members if member.group >= 0
        )
        if not self._brings:
            self._ranks.note("a backward without gradients of parameters")

    def abandon(self) -> None:
        """Drop the gradients that a failed backward has brought and no ``flush`` has stored."""
        self.pending.clear()
        self._brings = False  # the visits that are left of it bring none, and update nothing
        self.backwards, self._counts = self.backwards - self._counts, False
        for member in self.members:  # after a hook that raised some gradients were not collected
            take_gradient(member.parameter)

    def flush(self, visit: int) -> list[Chunk]:
        """Reduce the gradients that are complete after ``visit`` into chunks, with all ranks, as backward leaves it.

        Returns:
            The chunks to which no other visit brings a gradient, as far as that is known.
        """
        if not self._brings:
            return []
        present, pending = self.present, self.pending
        members = self._complete.get(visit, []) if self._ranks.several else [self.members[index] for index in pending]
        members = sorted(members, key=lambda member: (member.chunk.index, present[member.index], member.offset))
        for (chunk, accumulate), group in groupby(members, key=lambda member: (member.chunk, present[member.index])):
            stored = list(group)
            arrived = [member.index for member in stored if member.index in pending]
            if accumulate and chunk.accumulator is None:
                raise _one_more(f"a second gradient of {stored[0].name}", 2)
            self.pools.acquire(chunk)
            self.reduction.store(chunk, stored, pending, accumulate=accumulate)
            for index in arrived:
                present[index] = True
            self.delivered.update(arrived)
        reached = dict.fromkeys(member.chunk for member in members)
        complete = [chunk for chunk in reached if self._last_visit.get(chunk, visit) == visit]
        if self.is_last:
            for chunk in complete:
                self.reduction.send(chunk)
        return complete

    @property
    def is_last(self) -> bool:
        """Whether this is the last backward that the plan has for a step."""
        return self.backwards == self._accumulation

    def count_backward(self, *, no_sync: bool) -> None:
        """Another backward brings gradients. MisuseError if it is one more than planned."""
        begins = no_sync and not self.backwards  # a sum, as another backward follows
        if self.backwards + begins >= self._accumulation:
            what = "a backward() under model.no_sync()" if begins else "another backward()"
            raise _one_more(what, self.backwards + begins + 1)
        self.backwards, self._counts = self.backwards + 1, True

    def has_gradients(self, chunk: Chunk) -> bool:
        """Whether any parameter of ``chunk`` has a gradient."""
        return any(self.present[index] for index in chunk.parameters)

    def agree(self, chunk: Chunk) -> bool:
        """Let all ranks know which parameters of ``chunk`` have a gradient on any of them.

        Returns whether the chunk may be updated inside this backward, which must have brought a gradient to each of its
        parameters. Several ranks know that no other visit brings more, so those that have none may go without.
        """
        known = [(self.present[index], index in self.delivered) for index in chunk.parameters]
        of_ranks = self._ranks.all_values(known, f"whether chunk {chunk.index} has gradients")
        brought = []
        for index, *flags in zip(chunk.parameters, *of_ranks, strict=True):
            self.present[index], now = map(any, zip(*flags, strict=True))
            brought.append(now or (self._ranks.several and not self.present[index]))
        return all(brought)

    def combine(self, settings: Callable[[], Settings]) -> None:
        """End a backward: ranks exchange which parameters have a gradient, and the sums of squares for the norm.

        Args:
            settings: returns those of this rank, which must be those of all. With one rank nobody asks for them.

        Raises:
            MisuseError: it is not the same, or a gradient came too late to be reduced.
        """
        if self._ranks.several:
            requests, late = self._ranks.requests, self.members[min(self.pending)].name if self.pending else ""
            every = self._ranks.all_in_step(
                (settings(), late, bytes(self.present), requests.received), "the end of a backward"
            )
            late = next((name for _, name, *_ in every if name), "")
            if late:
                raise MisuseError(
                    f"the gradient of {late} came when all ranks had reduced it, or in a unit that the profiled step "
                    "did not call: pass an example_batch to protrain.wrap with which the model runs as it will be "
                    "trained, and compute a term of the loss that is made of weights after the forward"
                )
            _refuse_other_settings([of_rank for of_rank, *_ in every])
            requests.of_all = max(received for *_, received in every)
            self.present = [any(flags) for flags in zip(*(present for *_, present, _ in every), strict=True)]
            if self._brings:
                self.reduction.combine_squares()
        if self.is_last:
            self.reduction.settle()

    def forget(self, index: int) -> None:
        """The user has set ``.grad`` of parameter ``index`` to None."""
        if not self.present[index]:
            raise MisuseError(
                f"backward is just computing the gradient of {self.members[index].name}: set it to None when "
                "backward is over, or in a hook that is registered before protrain.wrap"
            )
        self.present[index] = False
        self.squares.forget(index)

    def refuse_missing(self, what: str, index: int | None = None) -> None:
        """MisuseError if there is no gradient, or none of parameter ``index``, which ``what`` needs."""
        if not (any(self.present) if index is None else self.present[index]):
            name = "gradients" if index is None else f"the gradient of {self.members[index].name}"
            raise MisuseError(f"{what} without {name}: call loss.backward() first, on parameters that were wrapped")

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
        self.reduction.reset()
        self.backwards, self._counts = 0, False
        self.pending.clear()
        self.present = [False] * len(self.members)
        self.squares.reset()


def _one_more(what: str, needed: int) -> MisuseError:
    """The error for gradients that come when all that were planned are there."""
    return MisuseError(
        f"{what} in a step, for whose sum in fp32 this plan has no memory: pass accumulation={needed} or more to "
        "protrain.wrap, the most backward() calls that a step will have. Otherwise call "
        "optimizer.zero_grad() after each step(), and backward() once on the sum of several losses. Under no_sync() no "
        "process trains weights of its own, as LocalSGD lets it, because each has a part of one model"
    )


def _completed(managed: ManagedModel) -> dict[int, list[Member]]:
    """By visit of the schedule, the trainable parameters that no later visit uses."""
    calls = managed.profile.calls
    visits = [*calls, *reversed(calls)]
    last = {
        member: visit
        for visit in range(len(calls), len(visits))
        for member in managed.units[visits[visit]].members
        if member.group >= 0
    }
    found: dict[int, list[Member]] = {}
    for member, visit in last.items():
        found.setdefault(visit, []).append(member)
    return dict(sorted(found.items()))


def _refuse_other_settings(of_ranks: Sequence[Settings]) -> None:
    """MisuseError on every rank if the ranks have other hyperparameters, or clipped otherwise in the last step."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        if other.options != first.options:
            differing = [
                f"{name} of group {index} is {theirs[name]}, not {value}"
                for index, (ours, theirs) in enumerate(zip(first.options, other.options, strict=False))
                for name, value in ours.items()
                if theirs[name] != value
            ] or [f"{len(other.options)} groups, not {len(first.options)}"]
            raise MisuseError(
                f"rank {rank} has other hyperparameters than rank 0 ({'; '.join(differing)}): set the same ones in "
                "every process"
            )
        # Clipping of torch and of the optimizer may differ in the last place of the norm.
        factors = first.factor, other.factor
        if not math.isclose(*factors, rel_tol=1e-4) and not all(map(math.isnan, factors)):
            raise MisuseError(
                f"in the last step rank {rank} multiplied gradients by {factors[1]:.4g} and rank 0 by "
                f"{factors[0]:.4g}, so they have updated their parts of the model differently: clip to the same norm "
                "in every process, and resume from a checkpoint"
            )


class GradientPools:
    """The buffers that chunks share for gradients, persistent ones and those in host memory, each if the plan has them.

    Args:
        managed: the model.
    """

    def __init__(self, managed: ManagedModel) -> None:
        plan = managed.plan
        self._memory = memory = managed.memory
        on_device, on_host = managed.layout.region_elements(plan.n_persist)
        # Both by whether the chunks that share buffers are persistent.
        self._elements = {True: on_device, False: on_host}  # of one buffer
        self._free: dict[bool, list[Tensor]] = {}
        if plan.n_device_gradient:
            self._free[True] = list(memory.zeros(plan.n_device_gradient, on_device))
        if plan.n_host_gradient:
            self._free[False] = [memory.arena.take(on_host, memory.dtype) for _ in range(plan.n_host_gradient)]
        self._in_use: dict[Chunk, Tensor] = {}
        self._released: dict[Chunk, Tensor] = {}  # in the order of release; an update may still read them

    def acquire(self, chunk: Chunk) -> None:
        """Give ``chunk`` memory for its gradient until ``release``, if it has none of its own.

        This waits for an update if no buffer is free. A chunk gets the buffer that it has released itself without a
        wait for the updates that read it.
        """
        if chunk in self._in_use or chunk.persistent not in self._free or (chunk.large and not chunk.persistent):
            return
        buffer = self._released.pop(chunk) if chunk in self._released else self._next(chunk.persistent)
        self._in_use[chunk] = buffer
        chunk.grad = buffer[: chunk.shard_elements]

    def release(self, chunk: Chunk) -> None:
        """Take back the buffer of ``chunk``, if it has one. What reads the gradient is queued."""
        if chunk in self._in_use:
            self._released[chunk] = self._in_use.pop(chunk)

    def release_all(self) -> None:
        """Take back all buffers, as all gradients are forgotten."""
        self._released.update(self._in_use)
        self._in_use.clear()

    def _next(self, persistent: bool) -> Tensor:
        if self._free[persistent]:
            return self._free[persistent].pop()
        released = [chunk for chunk in self._released if chunk.persistent is persistent]
        if not released:
            return self._more(persistent)
        # The device may still be updating the first of them when the host is done with later ones.
        chunk = next((one for one in released if one.last is None or one.last.done()), released[0])
        chunk.wait()
        chunk.grad = None
        return self._released.pop(chunk)

    def _more(self, persistent: bool) -> Tensor:
        """Another buffer. PlanError if there is no room for it."""
        memory, elements = self._memory, self._elements[persistent]
        size_bytes = elements * memory.dtype.itemsize
        where, needed_bytes, available_bytes = "device", size_bytes, memory.free_device_bytes
        if not persistent:
            where, needed_bytes = "host", whole_pages(size_bytes)
            available_bytes = memory.host_bytes - memory.arena.total_bytes
        if needed_bytes > available_bytes:
            raise PlanError(
                where=where,
                needed_bytes=needed_bytes,
                available_bytes=max(0, available_bytes),
                largest_part="another chunk's gradients",
                remedy="Parameters without a gradient in this backward keep more chunks waiting for its end than "
                f"planned: allow more {where}_memory, or set requires_grad=False for parameters that are never used.",
            )
        if not persistent:
            return memory.arena.take(elements, memory.dtype)
        memory.free_device_bytes -= size_bytes
        return memory.zeros(elements)
