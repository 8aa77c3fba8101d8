"""Chunks: contiguous runs of parameters, with all of their states side by side.

The parameters of a chunk are in execution order. Its states are

    weight (16-bit or fp32) | master (int16 remainder for bf16, fp32 for fp16) | exp_avg | exp_avg_sq | grad

A persistent chunk has all of them on the device. Every other chunk has them in the host arena, and its weight is copied
into a chunk buffer while it is needed. With several ranks, each rank has one shard of every state, a contiguous piece
as long as those of the others, and buffers hold the whole weight of any chunk while it is needed. A frozen chunk has a
weight and nothing else. A step of several backwards needs an fp32 accumulator of gradients as well. Chunks that share
memory for gradients ([Note: shared memory] in gradients.py) have no gradient of their own. Every length is a multiple
of 128 elements.

[Note: chunk states] The host works on a chunk beside the main thread. The state of the chunk says what the main thread
has queued and not waited for. Only the main thread changes it, or the thread that commits a step while that one waits:

    CURRENT     nothing: the states are those of the last step, and nothing reads the gradient
    SPECULATED  a speculative update, which reads the gradient and the states, and which a step may commit. Another
                gradient or an edit of weights ends it, and the update is then done anew.
    UPDATING    the update of a step, after which the weight is that of the step. A deferred update of the other states
                may follow it.

``protrain.engine.states.arena`` makes chunks from a plan.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from protrain.distributed.ranks import Ranks
from protrain.engine.streams import Event
from protrain.engine.updates.worker import Job
from protrain_kernels import (
    AdamScalars,
    AdamStaging,
    AdamStates,
    adam,
    padded,
    streamed_adam,
)


class State(enum.Enum):
    """A state of one of the engine's objects.

    A member's value is its name in messages, and after that the names of the states that may follow it.
    """

    def __init__(self, label: str, *followers: str) -> None:
        self.label = label
        self.followers = followers

    def become(self, new: Self) -> Self:
        """Return ``new``, which must be a follower. An illegal transition is a bug of the engine."""
        assert new.label in self.followers, f"illegal {type(self).__name__} transition {self.label} -> {new.label}"
        return new


class ChunkState(State):
    """Which work the host has with a chunk. See [Note: chunk states]."""

    CURRENT = "current", "speculated", "updating"
    SPECULATED = "speculated", "updating", "current"
    UPDATING = "updating", "updating", "current"  # updating: step() twice with the same gradients


_SLICE_ELEMENTS = 1 << 25  # the host updates so many in about 7 ms
Piece = tuple[slice, AdamScalars]  # a run of elements of a chunk, and the hyperparameters that it has in a step


@dataclass(eq=False)
class Member:
    """One managed parameter and its place in a chunk."""

    index: int  # in ModelProfile.parameters
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    numel: int
    group: int  # index of the optimizer group; -1: the parameter is frozen
    chunk: Chunk
    offset: int  # elements
    bound: int = 0  # how many running units use it
    address: int = 0  # of its data while a unit uses it
    steps: int = 0  # that have updated it, as a parameter without a gradient is not updated
    edits: int = 0  # autograd's count of changes in place that the engine knows of: see [Note: edits]
    stop: int = field(init=False)  # the end of its place in the chunk, with its padding
    shard_slice: slice = field(init=False)  # the elements of the chunk's shard that belong to it, with its padding

    def __post_init__(self) -> None:
        self.stop = self.offset + padded(self.numel)
        shard = self.chunk.shard
        first = max(self.offset, shard.start) - shard.start
        self.shard_slice = slice(first, max(first, min(self.stop, shard.stop) - shard.start))

    def view(self, flat: Tensor) -> Tensor:
        """The part of ``flat``, a 1-d tensor laid out as the chunk, that belongs to this parameter."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(eq=False)
class Chunk:
    """The states of one chunk. Tensors are 1-d and have the elements of this rank's shard, all of them on one rank."""

    index: int
    elements: int  # of the whole chunk
    shard: slice  # the elements whose states this rank has
    ranks: Ranks  # which have the shards, in their order
    trainable: bool
    persistent: bool
    large: bool  # it has one parameter that is larger than other chunks: [Note: large parameters] in planning.layout
    weight: Tensor
    offloaded: Event  # the last copy of a gradient to host memory is complete
    uploaded: Event  # the last upload has read ``weight``
    updated: Event  # the last update by the device is done, if it is persistent
    master: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    grad: Tensor | None = None
    # The fp32 sum of gradients of several backwards, which its readers round. It lies with the states, or on the device
    # although these do not: then ``grad`` gets the rounded sum.
    accumulator: Tensor | None = None
    accumulator_on_host: bool = False
    sum_factor: float = 1.0  # by which an update multiplies the sum in ``accumulator``: that of EngineMemory
    # What a speculative update writes: all states, or the weight only, as the plan has it. A commit exchanges them.
    speculative: AdamStates | Tensor | None = None
    # What lies in it, in the order of offsets: names by the index in ModelProfile.parameters. Members would refer back
    # to the chunk, and the memory of a model that is dropped has to go as soon as the last update has let it go.
    parameters: dict[int, str] = field(default_factory=dict, init=False)
    resident: bool = field(init=False)  # its whole weight stays on the device: it is persistent, and there is one rank
    # The weight of the last step, which uploads read. It is the speculative one while the other states are not updated.
    current_weight: Tensor = field(init=False)
    state: ChunkState = field(default=ChunkState.CURRENT, init=False)
    update: Job | None = field(default=None, init=False)  # after which the weight is that of the step, while UPDATING
    last: Job | None = field(default=None, init=False)  # that reads the gradient or writes states, unless CURRENT

    def __post_init__(self) -> None:
        self.resident = self.persistent and not self.ranks.several
        self.current_weight = self.weight

    @property
    def shard_elements(self) -> int:
        """The elements of this rank's shard, which each state has."""
        return self.shard.stop - self.shard.start

    @property
    def gradient(self) -> Tensor:
        """The gradient of the step, or the sum of several backwards, where an update reads it: beside the other states.

        If the chunk is in host memory, its gradient is complete when ``offloaded`` is reached.
        """
        gradient = self.accumulator if self.grad is None else self.grad
        assert gradient is not None
        return gradient

    @property
    def gradient_factor(self) -> float:
        """The factor of an update on the gradient: a sum still lacks that of the mean over ranks."""
        return 1.0 if self.accumulator is None or self.grad is not None else self.sum_factor

    def begin(self, state: ChunkState, job: Job, *, then: Job | None = None) -> None:
        """Give the host ``job``, and ``then`` after it."""
        self.state = self.state.become(state)
        self.last, self.update = then or job, job if state is ChunkState.UPDATING else None

    def wait_for_update(self) -> None:
        """Block until the weight in host memory is that of the last step."""
        if self.update is not None:
            self.update.result()

    def wait(self) -> None:
        """Block until nothing that was queued reads the gradient, or reads or writes the states."""
        if (last := self.last) is None:
            return
        if self.update is None:
            last.exception()  # of a speculative update, which has left the states unchanged and is done anew
        else:
            self.update.result()
            last.result()  # an error in either is raised in all who wait
        if self.last is last:  # no signal handler has waited as well meanwhile
            self.state, self.last, self.update = self.state.become(ChunkState.CURRENT), None, None

    @property
    def speculates_weight_only(self) -> bool:
        """Whether a speculative update computes the weight only."""
        return isinstance(self.speculative, Tensor)

    def adam(
        self,
        pieces: list[Piece],
        gradient: Tensor,
        scale: Tensor | None,
        *,
        threads: int,
        between: Callable[[], None] | None = None,
    ) -> None:
        """AdamW on ``pieces``, where the chunk lies.

        Args:
            pieces: runs of elements with their hyperparameters.
            gradient: that of the chunk, on the device of the states.
            scale: factor on the gradient, 0-d or one element, on the same device.
            threads: number of host threads.
            between: called on the host every few milliseconds of the update.
        """
        for part, scalars in pieces if between is None else _sliced(pieces, between):
            states, part_gradient = self.states.part(part), gradient[part]
            adam(*states, part_gradient, scalars, gradient_factor=self.gradient_factor, scale=scale, threads=threads)

    def adam_streamed(self, pieces: list[Piece], gradient: Tensor, scale: Tensor | None, staging: AdamStaging) -> None:
        """Have the device do AdamW on ``pieces`` of this chunk in host memory; queued on the current stream.

        ``gradient`` is in host memory, and ``scale`` on the device.
        """
        for part, scalars in pieces:
            states = self.states.part(part)
            streamed_adam(*states, gradient[part], scalars, staging, gradient_factor=self.gradient_factor, scale=scale)

    def adam_speculatively(self, pieces: list[Piece], gradient: Tensor, scale: Tensor | None, *, threads: int) -> None:
        """AdamW from the states into ``speculative``. ``pieces`` must cover the chunk, as a commit takes all of it."""
        copy = self.speculative
        assert copy is not None
        how: dict[str, Any] = {"gradient_factor": self.gradient_factor, "scale": scale, "threads": threads}
        for part, scalars in pieces:
            new = copy[part] if isinstance(copy, Tensor) else copy.part(part)
            adam(*self.states.part(part), gradient[part], scalars, out=new, **how)

    def commit(self) -> None:
        """Take over what ``adam_speculatively`` wrote. If that is the weight only, the other states come later."""
        assert self.speculative is not None
        if isinstance(self.speculative, Tensor):
            self.uploaded.synchronize()  # it reads the weight before: from now on uploads read the speculative one
            self.current_weight = self.speculative
            return
        before = self.states
        self.weight, self.master, self.exp_avg, self.exp_avg_sq = self.speculative
        self.speculative = before
        self.current_weight = self.weight

    @property
    def states(self) -> AdamStates:
        """The states of a trainable chunk."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        return AdamStates(self.weight, self.master, self.exp_avg, self.exp_avg_sq)


def _sliced(pieces: list[Piece], between: Callable[[], None]) -> Iterator[Piece]:
    """``pieces`` in slices of a few milliseconds, before each of which ``between`` is called."""
    for part, scalars in pieces:
        for start in range(part.start, part.stop, _SLICE_ELEMENTS):
            between()
            yield slice(start, min(part.stop, start + _SLICE_ELEMENTS)), scalars
