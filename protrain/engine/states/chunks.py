"""Chunks: where every element of the model states lives.

A chunk is a contiguous run of parameters in execution order, with all its states side by side:

    weight (16-bit or fp32) | master (int16 remainder for bf16, fp32 for fp16) | exp_avg | exp_avg_sq | grad

A persistent chunk keeps all of them on the device, weight and master in one piece of memory and the rest in another, a
non-persistent one keeps all of them in the host arena, and a frozen chunk has a weight only. Where a step has several
batches there is an fp32 accumulator of their gradients as well, on the device in place of a gradient. Where chunks take
turns in regions for their gradients (:mod:`protrain.engine.gradients.regions`) they have none of their own. Every
length is a multiple of 128 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from protrain.engine.states.arena import Arena, aligned
from protrain.engine.streams import Mark, Streams
from protrain.engine.updates.worker import Job
from protrain.engine.weights.views import Viewers
from protrain.planning.layout import ChunkRecord, Layout
from protrain.planning.plan import Plan
from protrain.profiler.model_profile import ModelProfile
from protrain_kernels import (
    MASTER_DTYPES,
    AdamScalars,
    AdamStaging,
    AdamStates,
    adam,
    adam_out_of_place,
    adam_weight,
    streamed_adam,
)

_STRETCH = 1 << 25  # elements, which the host updates in some 7 ms
_TRANSFERRED = ("weight", "grad")  # the states of a non-persistent chunk that travel
_VALUES = ("weight", "master")  # the states that initialising and loading write
Piece = tuple[slice, AdamScalars]  # elements of a chunk, and what holds for them in a step
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(eq=False)
class Member:
    """One managed parameter and its place in a chunk."""

    index: int  # in ModelProfile.parameters
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    numel: int
    group: int  # optimizer group; -1 is frozen
    chunk: Chunk
    offset: int  # elements
    bound: int = 0  # how many active units hold it on the device
    address: int = 0  # of its weight in a persistent chunk
    edits: int = 0  # autograd's count of changes in place that are known of: see [Note: edits]

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a 1-d tensor laid out as its chunk."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(eq=False)
class Chunk:
    """The states of one chunk; tensors are 1-d with ``elements`` elements."""

    index: int
    elements: int
    trainable: bool
    persistent: bool
    large: bool  # of one parameter that is larger than other chunks: [Note: large parameters] in planning.layout
    weight: Tensor
    master: Tensor | None
    exp_avg: Tensor | None
    exp_avg_sq: Tensor | None
    grad: Tensor | None
    offloaded: Mark  # the last gradient offload into ``grad`` is complete
    uploaded: Mark  # the last upload has read ``weight``
    members: list[Member] = field(default_factory=list)
    landing: Tensor | None = None  # host memory where offloaded gradients arrive: ``grad`` of a non-persistent chunk
    accumulator: Tensor | None = None  # fp32 gradients: planned, or once a step has had more than one backward
    accumulator_on_host: bool = False
    accumulation: Job | None = None  # the last host addition that reads ``landing``
    update: Job | None = None  # the last update on the host; None when there was none
    spare: AdamStates | None = None  # where the states after a step are made before it is certain
    early_weight: Tensor | None = None  # where the weight is, without the other states
    states_behind: bool = False  # a step has taken the early weight, and the states are yet to follow
    states_update: Job | None = None  # in which they do
    early: Job | None = None  # the last such update; None once its gradient has given way to others
    streamed: bool = False  # in host memory and updated by the device
    version: int = 0  # counts changes of the weight
    holders: int = 0  # units that use the weight of a persistent chunk now
    viewers: Viewers = field(init=False)  # of the weight of a persistent chunk

    def __post_init__(self) -> None:
        self.viewers = Viewers(self.weight)

    def wait_for_update(self) -> None:
        """Block until the weight in host memory is that of the last step."""
        if self.update is not None:
            self.update.wait()
            self.update = None

    def wait_for_accumulation(self) -> None:
        """Block until no addition reads ``landing``."""
        if self.accumulation is not None:
            self.accumulation.wait()
            self.accumulation = None

    def wait_for_landing(self) -> None:
        """Block until no addition and no update reads ``landing``."""
        self.wait_for_accumulation()
        early, self.early = self.early, None  # an error in it is raised once: the states are as they were
        if early is not None:
            early.wait()
        self.wait_for_update()
        self.wait_for_states()

    def wait_for_states(self) -> None:
        """Block until the states have followed an early weight. An error in that is raised in all who wait."""
        if self.states_update is not None:
            self.states_update.wait()
            self.states_update = None

    def landing_is_free(self) -> bool:
        """Whether ``wait_for_landing`` would return at once."""
        jobs = (self.accumulation, self.early, self.update, self.states_update)
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
        """AdamW on ``pieces``, runs of elements with the same hyperparameters, wherever the chunk lies.

        As far as ``gradient`` goes, which begins with element ``first``.

        Args:
            pieces: the runs and what holds for them.
            gradient: of the chunk, or a part of it, beside its states.
            scale: factor on it, 0-d or one element, beside it.
            threads: on the host.
            first: where that part begins.
            between: called before a stretch of some milliseconds, on the host, until it says that it need not be.
        """
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        end = first + gradient.numel()
        for piece, scalars in pieces if between is None else _stretched(pieces, between):
            part = slice(max(piece.start, first), min(piece.stop, end))
            if part.start >= part.stop:
                continue
            adam(
                self.weight[part],
                None if self.master is None else self.master[part],
                self.exp_avg[part],
                self.exp_avg_sq[part],
                gradient[part.start - first : part.stop - first],
                scalars,
                scale=scale,
                threads=threads,
            )
        self.version += 1

    def step_streamed(
        self,
        pieces: list[Piece],
        gradient: Tensor,
        scale: Tensor | None,
        staging: AdamStaging,
    ) -> None:
        """The same by the device, where ``scale`` lies, on what lies in host memory: queued on the current stream."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        for part, scalars in pieces:
            streamed_adam(
                self.weight[part],
                None if self.master is None else self.master[part],
                self.exp_avg[part],
                self.exp_avg_sq[part],
                gradient[part],
                scalars,
                staging,
                scale=scale,
            )
        self.version += 1

    @property
    def current_weight(self) -> Tensor:
        """What an upload takes: after a step, its weight."""
        if not self.states_behind:
            return self.weight
        assert self.early_weight is not None
        return self.early_weight

    def step_aside(self, pieces: list[Piece], gradient: Tensor, scale: Tensor | None, *, threads: int) -> None:
        """The same into ``spare``, or of the weight alone into ``early_weight``. ``pieces`` are all of the chunk."""
        for part, scalars in pieces:
            old = _part(self.states, part)
            if self.spare is not None:
                new = _part(self.spare, part)
                adam_out_of_place(old, new, gradient[part], scalars, scale=scale, threads=threads)
            else:
                assert self.early_weight is not None
                adam_weight(old, self.early_weight[part], gradient[part], scalars, scale=scale, threads=threads)

    def adopt(self) -> None:
        """Take the states that :meth:`step_aside` made; the old ones are spare now."""
        assert self.spare is not None
        before = self.states
        self.weight, self.master, self.exp_avg, self.exp_avg_sq = self.spare
        self.spare = before
        self.version += 1

    @property
    def states(self) -> AdamStates:
        """Of a trainable chunk."""
        assert self.exp_avg is not None
        assert self.exp_avg_sq is not None
        return AdamStates(self.weight, self.master, self.exp_avg, self.exp_avg_sq)


def _stretched(pieces: list[Piece], between: Callable[[], bool]) -> Iterator[Piece]:
    more = True
    for part, scalars in pieces:
        start = part.start
        while start < part.stop:
            more = more and between()
            stop = min(part.stop, start + _STRETCH) if more else part.stop
            yield slice(start, stop), scalars
            start = stop


def _part(states: AdamStates, part: slice) -> AdamStates:
    master = None if states.master is None else states.master[part]
    return AdamStates(states.weight[part], master, states.exp_avg[part], states.exp_avg_sq[part])


def state_layout(
    trainable: bool,
    dtype: torch.dtype,
    moment_dtype: torch.dtype,
    *,
    gradient: bool = True,
    accumulator: bool = False,
) -> dict[str, torch.dtype]:
    """State name -> dtype of a chunk, in the order in which they lie in memory.

    With room for a gradient or without, and for what gradients are added to.
    """
    states = {"weight": dtype}
    if trainable:
        master = MASTER_DTYPES[dtype]
        if master is not None:
            states["master"] = master
        states |= {"exp_avg": moment_dtype, "exp_avg_sq": moment_dtype}
        if gradient:
            states["grad"] = dtype
        if accumulator:
            states["accumulator"] = torch.float32
    return states


def held_states(record: ChunkRecord, layout: Layout, plan: Plan, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What the chunk of ``record`` has for itself under ``plan``, with its dtypes."""
    persistent, accumulates = record.index < plan.n_persist, plan.accumulation > 1
    shares = plan.n_device_gradient if persistent else plan.n_host_gradient and not layout.is_large(record)
    gradient = not shares
    if persistent:  # fp32 gradients are added to the gradient itself
        accumulates = accumulates and dtype is not torch.float32
        gradient = gradient and not accumulates
    return state_layout(record.trainable, dtype, DTYPES[plan.moment_dtype], gradient=gradient, accumulator=accumulates)


def size_bytes(record: ChunkRecord, kinds: Mapping[str, torch.dtype]) -> list[int]:
    """Of each; multiples of 256, as every length is one of 128 elements."""
    return [record.elements * kind.itemsize for kind in kinds.values()]


def make_chunks(
    layout: Layout,
    plan: Plan,
    dtype: torch.dtype,
    device: torch.device,
    arena: Arena,
    streams: Streams,
    *,
    streamed: Collection[int] = (),
) -> list[Chunk]:
    """All chunks, states zeroed. The arena is reserved for the non-persistent ones in one piece.

    Persistent ones have no more than their weights and masters until :func:`complete_chunks`.

    The first ``plan.n_speculate`` of those have room for a second copy of what an update writes, or with
    ``plan.early_weights`` all but the last ``plan.n_whole`` of these of the weight alone. Of the ``streamed``, by
    index, the device reaches all states. Where gradients share regions chunks have no room for their own; the arena's
    piece has that of the regions.
    """
    away = layout.chunks[plan.n_persist :]
    sizes = [size for record in away for size in size_bytes(record, held_states(record, layout, plan, dtype))]
    early = [record for record in away[: plan.n_speculate] if record.trainable]
    n_alone = plan.n_speculate - plan.n_whole if plan.early_weights else 0
    alone = {record.index for record in away[:n_alone]}
    copied = state_layout(True, dtype, DTYPES[plan.moment_dtype], gradient=False)
    for record in early:
        sizes += [record.elements * dtype.itemsize] if record.index in alone else size_bytes(record, copied)
    sizes += [layout.region_elements(plan.n_persist)[1] * dtype.itemsize] * plan.n_host_gradient
    arena.reserve(sum(map(aligned, sizes)))
    chunks = []
    for record in layout.chunks:
        persistent = record.index < plan.n_persist
        kinds = held_states(record, layout, plan, dtype)
        if persistent:
            states = _on_device(record, {name: kinds[name] for name in _VALUES if name in kinds}, device)
        else:
            states = {
                name: arena.take(record.elements, kind, transferred=name in _TRANSFERRED or record.index in streamed)
                for name, kind in kinds.items()
            }
        spare = early_weight = None
        if record in early and record.index in alone:
            early_weight = arena.take(record.elements, dtype)
        elif record in early:
            copies = {
                name: arena.take(record.elements, kind, transferred=name in _TRANSFERRED)
                for name, kind in copied.items()
            }
            spare = AdamStates(copies["weight"], copies.get("master"), copies["exp_avg"], copies["exp_avg_sq"])
        chunks.append(
            Chunk(
                index=record.index,
                elements=record.elements,
                trainable=record.trainable,
                persistent=persistent,
                large=layout.is_large(record),
                weight=states["weight"],
                master=states.get("master"),
                exp_avg=states.get("exp_avg"),
                exp_avg_sq=states.get("exp_avg_sq"),
                grad=states.get("grad"),
                landing=None if persistent else states.get("grad"),
                accumulator=states.get("accumulator"),
                accumulator_on_host="accumulator" in states and not persistent,
                offloaded=streams.mark(),
                uploaded=streams.mark(),
                spare=spare,
                early_weight=early_weight,
                streamed=record.index in streamed,
            )
        )
    return chunks


def complete_chunks(chunks: list[Chunk], layout: Layout, plan: Plan, dtype: torch.dtype, device: torch.device) -> None:
    """Give the persistent chunks the rest of their states, zeroed.

    Once the weights are in place: until then there is room for what making them takes.
    """
    for chunk, record in zip(chunks[: plan.n_persist], layout.chunks[: plan.n_persist], strict=True):
        kinds = held_states(record, layout, plan, dtype)
        rest = _on_device(record, {name: kind for name, kind in kinds.items() if name not in _VALUES}, device)
        chunk.exp_avg, chunk.exp_avg_sq = rest.get("exp_avg"), rest.get("exp_avg_sq")
        chunk.grad, chunk.accumulator = rest.get("grad"), rest.get("accumulator")


def _on_device(record: ChunkRecord, kinds: Mapping[str, torch.dtype], device: torch.device) -> dict[str, Tensor]:
    """States of ``kinds`` of the chunk of ``record``, zeroed, side by side."""
    sizes = size_bytes(record, kinds)
    parts = torch.zeros(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    return {name: part.view(kind) for (name, kind), part in zip(kinds.items(), parts, strict=True)}


def make_members(
    profile: ModelProfile, layout: Layout, chunks: list[Chunk], parameters: list[nn.Parameter]
) -> list[Member]:
    """One member per parameter of the profile, in definition order, entered into its chunk in offset order."""
    members = []
    for slot, record, parameter in zip(layout.slots, profile.parameters, parameters, strict=True):
        member = Member(
            index=slot.parameter,
            name=record.name,
            parameter=parameter,
            shape=torch.Size(record.shape),
            numel=slot.numel,
            group=record.group,
            chunk=chunks[slot.chunk],
            offset=slot.offset,
        )
        if member.chunk.persistent:
            member.address = member.view(member.chunk.weight).data_ptr()
        member.chunk.members.append(member)
        members.append(member)
    for chunk in chunks:
        chunk.members.sort(key=lambda member: member.offset)
    return members
