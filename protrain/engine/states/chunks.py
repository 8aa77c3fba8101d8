"""Chunks: contiguous runs of parameters, with all of their states side by side.

The parameters of a chunk are in execution order. Its states are

    weight (16-bit or fp32) | master (int16 remainder for bf16, fp32 for fp16) | exp_avg | exp_avg_sq | grad

A persistent chunk has all of them on the device. Every other chunk has them in the host arena, and its weight is copied
into a chunk buffer while it is needed. A frozen chunk has a weight and nothing else. A step of several backwards needs
an fp32 accumulator of gradients as well. Chunks that share memory for gradients
(:mod:`protrain.engine.gradients.pool`) have no gradient of their own. Every length is a multiple of 128 elements.

:mod:`protrain.engine.states.allocation` makes chunks from a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from protrain.engine.streams import Mark
from protrain.engine.updates.worker import Job
from protrain_kernels import (
    AdamScalars,
    AdamStaging,
    AdamStates,
    adam,
    adam_out_of_place,
    adam_weight,
    streamed_adam,
)

_SLICE = 1 << 25  # elements that the host updates in about 7 ms
Piece = tuple[slice, AdamScalars]  # a run of elements of a chunk, and the hyperparameters that it has in a step
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
    edits: int = 0  # autograd's count of changes in place that the engine knows of: see [Note: edits]

    def view(self, flat: Tensor) -> Tensor:
        """The part of ``flat``, a 1-d tensor laid out as the chunk, that belongs to this parameter."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(eq=False)
class Chunk:
    """The states of one chunk. Tensors are 1-d and have ``elements`` elements."""

    index: int
    elements: int
    trainable: bool
    persistent: bool
    large: bool  # it has one parameter that is larger than other chunks: [Note: large parameters] in planning.layout
    weight: Tensor
    master: Tensor | None
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None
    grad: Tensor | None
    offloaded: Mark  # the last copy of a gradient to ``host_grad`` is complete
    uploaded: Mark  # the last upload has read ``weight``
    members: list[Member] = field(default_factory=list)
    host_grad: Tensor | None = None  # host memory for gradients that are offloaded: ``grad`` if not persistent
    accumulator: Tensor | None = None  # the fp32 sum of gradients of several backwards
    accumulator_on_host: bool = False
    accumulation: Job | None = None  # the last addition on the host that reads ``host_grad``
    update: Job | None = None  # the last update on the host
    speculative_states: AdamStates | None = None  # what a speculative update writes, and a commit exchanges
    speculative_weight: Tensor | None = None  # what it writes if the plan has it compute the weight only
    speculation: Job | None = None  # the last speculative update; None once its gradient was overwritten
    states_pending: bool = False  # a step has committed the speculative weight, and the other states are not updated
    deferred_update: Job | None = None  # the job that will update them
    streamable: bool = False  # it lies in host memory, and all its states are pinned, so that the device can update it
    version: int = 0  # counts changes of the weight

    @property
    def speculates(self) -> bool:
        """Whether it has memory for what a speculative update writes."""
        return self.speculative_states is not None or self.speculative_weight is not None

    def wait_for_update(self) -> None:
        """Block until the weight in host memory is that of the last step."""
        if self.update is not None:
            self.update.wait()
            self.update = None

    def wait_for_accumulation(self) -> None:
        """Block until no addition reads ``host_grad``."""
        if self.accumulation is not None:
            self.accumulation.wait()
            self.accumulation = None

    def wait_for_host_grad(self) -> None:
        """Block until no addition and no update reads ``host_grad``."""
        self.wait_for_accumulation()
        # An error in a speculative update is raised once, as it has left the states unchanged.
        speculation, self.speculation = self.speculation, None
        if speculation is not None:
            speculation.wait()
        self.wait_for_update()
        self.wait_for_deferred_update()

    def wait_for_deferred_update(self) -> None:
        """Block until the states belong to the weight. An error in the deferred update is raised in all who wait."""
        if self.deferred_update is not None:
            self.deferred_update.wait()
            self.deferred_update = None

    def host_grad_is_free(self) -> bool:
        """Whether :meth:`wait_for_host_grad` would return at once."""
        jobs = (self.accumulation, self.speculation, self.update, self.deferred_update)
        return all(job is None or job.done for job in jobs)

    def step(
        self,
        pieces: list[Piece],
        gradient: Tensor,
        scale: Tensor | None,
        *,
        threads: int,
        first: int = 0,
        between: Callable[[], bool] | None = None,
    ) -> None:
        """AdamW on ``pieces``, as far as ``gradient`` reaches, where the chunk lies.

        Args:
            pieces: runs of elements with their hyperparameters.
            gradient: the gradient of the chunk or of a part of it, on the device of the states.
            scale: factor on the gradient, 0-d or one element, on the same device.
            threads: number of host threads.
            first: the element of the chunk at which ``gradient`` begins.
            between: called on the host every few milliseconds of the update, until it returns False.
        """
        states, end = self.states, first + gradient.numel()
        for piece, scalars in pieces if between is None else _sliced(pieces, between):
            part = slice(max(piece.start, first), min(piece.stop, end))
            if part.start >= part.stop:
                continue
            own_gradient = gradient[part.start - first : part.stop - first]
            adam(*_part(states, part), own_gradient, scalars, scale=scale, threads=threads)
        self.version += 1

    def step_streamed(
        self,
        pieces: list[Piece],
        gradient: Tensor,
        scale: Tensor | None,
        staging: AdamStaging,
    ) -> None:
        """Have the device do AdamW on ``pieces`` of this chunk in host memory; queued on the current stream.

        ``gradient`` is in host memory, and ``scale`` on the device.
        """
        for part, scalars in pieces:
            states = _part(self.states, part)
            streamed_adam(*states, gradient[part], scalars, staging, scale=scale)
        self.version += 1

    @property
    def current_weight(self) -> Tensor:
        """The weight of the last step, which an upload copies."""
        if not self.states_pending:
            return self.weight
        assert self.speculative_weight is not None
        return self.speculative_weight

    def step_speculatively(self, pieces: list[Piece], gradient: Tensor, scale: Tensor | None, *, threads: int) -> None:
        """AdamW from the states into ``speculative_states`` or ``speculative_weight``, whichever the chunk has.

        ``pieces`` must cover the chunk, as a commit takes all of what was written.
        """
        for part, scalars in pieces:
            old = _part(self.states, part)
            if self.speculative_states is not None:
                new = _part(self.speculative_states, part)
                adam_out_of_place(old, new, gradient[part], scalars, scale=scale, threads=threads)
            else:
                assert self.speculative_weight is not None
                adam_weight(old, self.speculative_weight[part], gradient[part], scalars, scale=scale, threads=threads)

    def commit(self) -> None:
        """Exchange the states for those that :meth:`step_speculatively` wrote."""
        assert self.speculative_states is not None
        before = self.states
        self.weight, self.master, self.exp_avg, self.exp_avg_sq = self.speculative_states
        self.speculative_states = before
        self.version += 1

    @property
    def states(self) -> AdamStates:
        """The states of a trainable chunk."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        return AdamStates(self.weight, self.master, self.exp_avg, self.exp_avg_sq)


def _sliced(pieces: list[Piece], between: Callable[[], bool]) -> Iterator[Piece]:
    """``pieces`` in slices of a few milliseconds, before each of which ``between`` is called until it returns False."""
    more = True
    for part, scalars in pieces:
        start = part.start
        while start < part.stop:
            more = more and between()
            stop = min(part.stop, start + _SLICE) if more else part.stop
            yield slice(start, stop), scalars
            start = stop


def _part(states: AdamStates, part: slice) -> AdamStates:
    master = None if states.master is None else states.master[part]
    return AdamStates(states.weight[part], master, states.exp_avg[part], states.exp_avg_sq[part])
