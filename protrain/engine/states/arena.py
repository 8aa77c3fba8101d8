"""Where the states of a plan lie: chunks, their members, and the host arena.

The arena is all host memory of the engine, exact to the page, pinned where transfers touch it.

The arena consists of anonymous mappings (``protrain.common.host_memory``), which it hands out page by page. A piece
that is copied to or from a GPU is registered with the CUDA driver when it is handed out. Each piece is registered by
itself, because a copy must not cross from one registration into another. torch's ``pin_memory`` rounds sizes up to
powers of two and takes several times longer.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from protrain.common.errors import BudgetError, warn_user
from protrain.common.host_memory import HostMapping
from protrain.common.parameters import DTYPES
from protrain.common.tables import format_bytes
from protrain.distributed.ranks import Ranks
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.streams import Event, Streams
from protrain.planning.layout import ChunkRecord, Layout
from protrain.planning.plan import Plan
from protrain.profiler.model_profile import ModelProfile
from protrain_kernels import MASTER_DTYPES, AdamStates

UNPINNED = (
    "the driver refuses to pin host memory, so that copies to and from the GPU are slow and nothing overlaps them: "
    "raise the limit of locked memory (ulimit -l, --ulimit memlock=-1 of a container, memory= in WSL's "
    ".wslconfig), or pass a smaller host_memory"
)


def whole_pages(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole pages: the bytes that a piece of the arena occupies."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """Host memory in a few large segments, handed out from the front and never given back piece by piece.

    Args:
        device: the device that the memory is copied to and from. Memory for a GPU is pinned, and stays pinned as long
            as there are tensors on it, with the arena or without ([Note: who unpins] in
            protrain/common/host_memory.py).

    The driver may refuse to pin memory, in WSL and in containers above all. Training then goes on with a warning: a
    copy of such memory is right, but it is slow, and the thread that asks for it waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = 0
        self.all_pinned = True  # all that was to be pinned
        self._segments: list[_Segment] = []

    @property
    def free_bytes(self) -> int:
        """The size of the largest piece that ``take`` can hand out without mapping more memory."""
        return max((segment.free_bytes for segment in self._segments), default=0)

    def reserve(self, size_bytes: int) -> None:
        """Map and touch ``size_bytes`` more at once. MemoryError when the system has no such memory."""
        if size_bytes > 0:
            mapping = HostMapping(whole_pages(size_bytes))
            with torch.inference_mode(False):  # what is made in inference mode cannot be written outside of it
                self._segments.append(_Segment(mapping, mapping.tensor()))
            self.total_bytes += whole_pages(size_bytes)

    def take(self, elements: int, dtype: torch.dtype, *, transferred: bool = True) -> Tensor:
        """A 1-d tensor of ``elements`` zeros on pages of its own. Maps more memory when the reserve is used up.

        ``transferred`` says whether the tensor is copied to or from the device, so that it must be pinned for a GPU.
        """
        size_bytes = elements * dtype.itemsize
        occupied_bytes = whole_pages(size_bytes)
        if occupied_bytes > self.free_bytes:
            self.reserve(occupied_bytes)
        segment = next(each for each in self._segments if each.free_bytes >= occupied_bytes)
        piece = segment.memory[segment.used_bytes : segment.used_bytes + occupied_bytes]
        segment.used_bytes += occupied_bytes
        if transferred and self._device.type == "cuda" and not segment.mapping.pin(piece, self._device):
            if self.all_pinned:
                warn_user(UNPINNED)
            self.all_pinned = False
        return piece[:size_bytes].view(dtype)


@dataclass(eq=False)
class _Segment:
    mapping: HostMapping
    memory: Tensor  # bytes
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.memory.nbytes - self.used_bytes


class HostSlots:
    """Host memory for swapped blocks: slots that frames take and release, all of them within ``limit_bytes``."""

    def __init__(self, arena: Arena, streams: Streams, *, limit_bytes: int) -> None:
        self.arena = arena
        self.streams = streams
        self.limit_bytes = limit_bytes  # the limit of the whole arena
        self._free: list[tuple[Tensor, Event]] = []

    def take(self, size_bytes: int) -> tuple[Tensor, Event]:
        """The smallest free slot that fits, and the event after which it may be written.

        Raises:
            BudgetError: more forwards wait for their backward than the plan was made for.
        """
        fitting = [(slot.numel(), at) for at, (slot, _) in enumerate(self._free) if slot.numel() >= size_bytes]
        if fitting:
            return self._free.pop(min(fitting)[1])  # in place, as the collector may release another slot at any time
        if size_bytes > self.arena.free_bytes and self.arena.total_bytes + size_bytes > self.limit_bytes:
            raise BudgetError(
                f"no host memory to swap another {format_bytes(size_bytes)} of activations to: "
                f"{format_bytes(self.arena.total_bytes)} of host_memory={format_bytes(self.limit_bytes)} are taken; "
                "call backward() before the next forward and without retain_graph, or allow more host_memory"
            )
        return self.arena.take(size_bytes, torch.uint8), self.streams.event()

    def release(self, slot: Tensor, read: Event) -> None:
        """Take back the ``slot`` of a frame that ends now. It is free when ``read`` is reached.

        The device memory that the frame has fetched and not used, because its backward failed or took another path, is
        freed with it. The compute stream waits for the fetch, which must not overwrite what gets that memory next.
        """
        self.streams.compute.wait_event(read)
        self._free.append((slot, read))


class ActivationBytes(NamedTuple):
    """Device memory that forward and backward of the planned batch may take, by the memory model."""

    as_planned: int
    all_recomputed: int  # if every block is recomputed, and nothing offloaded


@dataclass(kw_only=True)
class EngineMemory:
    """The device, streams, host memory and limits with which all parts of one engine allocate and copy."""

    device: torch.device
    dtype: torch.dtype  # of weights and gradients
    streams: Streams
    arena: Arena
    ranks: Ranks  # the processes that train together
    free_device_bytes: int  # what the plan leaves of the limit of device memory
    activations: ActivationBytes
    host_bytes: int  # the limit of host memory
    sum_factor: float = 1.0  # on the sum of the gradients of all ranks: 1 / ranks for their mean
    poison: bool = False  # fill released device memory with NaN, so that a use of it shows (PROTRAIN_DEBUG=1)
    zeros_bytes: int = field(default=0, init=False)  # of all that ``zeros`` has made

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Device memory that lives as long as the engine, recorded for all streams. By default it has its ``dtype``."""
        made = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        self.zeros_bytes += made.nbytes
        return self.streams.record_streams(made)


_TRANSFERRED = ("weight", "grad")  # the states in host memory that are copied to or from the device
_VALUES = ("weight", "master")  # the states that initialising and loading write


def planned_states(record: ChunkRecord, layout: Layout, plan: Plan, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states that the chunk of ``record`` has for itself under ``plan``, with their dtypes, where its weight lies.

    A chunk in host memory whose sum of several backwards lies on the device has a gradient for the rounded sum.
    """
    persistent = record.index < plan.n_persist
    shares = plan.n_device_gradient if persistent else plan.n_host_gradient and not layout.is_large(record)
    states = _weight_states(record, plan, dtype)
    if record.trainable and plan.accumulation > 1 and not plan.sums_on_device(record.index):
        states["accumulator"] = torch.float32
    elif record.trainable and not shares:
        states["grad"] = dtype
    return states


def _weight_states(record: ChunkRecord, plan: Plan, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states that an update writes, in the order in which they lie in memory."""
    states = {"weight": dtype}
    if record.trainable:
        if (master := MASTER_DTYPES[dtype]) is not None:
            states["master"] = master
        moments = DTYPES[plan.moment_dtype]
        states |= {"exp_avg": moments, "exp_avg_sq": moments}
    return states


def state_sizes_bytes(elements: int, kinds: Mapping[str, torch.dtype]) -> list[int]:
    """The bytes of each state of ``elements`` elements. They are multiples of 256, as shards are of 128 elements."""
    return [elements * kind.itemsize for kind in kinds.values()]


def make_chunks(layout: Layout, plan: Plan, memory: EngineMemory) -> list[Chunk]:
    """All chunks, with zeros in their states. The arena is reserved in one piece.

    Persistent chunks have their weights and masters only, until ``complete_chunks`` gives them the rest. The first
    ``plan.n_speculate`` of the other chunks get a second copy of the states that an update writes, and the first
    ``plan.n_weight_only`` of these a second copy of the weight only. All states in host memory are pinned if the device
    may update them. Gradients that share memory are not allocated here, but the arena is reserved for them too.
    """
    planned = [planned_states(record, layout, plan, memory.dtype) for record in layout.chunks]
    copied = [_copied_states(record, plan, memory.dtype) for record in layout.chunks]
    memory.arena.reserve(_host_bytes(layout, plan, memory.dtype, planned, copied))

    def in_host_memory(elements: int, kinds: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        return {
            name: memory.arena.take(elements, kind, transferred=plan.stream or name in _TRANSFERRED)
            for name, kind in kinds.items()
        }

    chunks = []
    for record, kinds, copied_kinds in zip(layout.chunks, planned, copied, strict=True):
        persistent, elements = record.index < plan.n_persist, layout.shard_elements(record)
        if persistent:
            states = _on_device(elements, {name: kinds[name] for name in _VALUES if name in kinds}, memory.device)
        else:
            states = in_host_memory(elements, kinds)
        copies: dict[str, Any] = in_host_memory(elements, copied_kinds)
        chunks.append(
            Chunk(
                index=record.index,
                elements=record.elements,
                shard=slice(memory.ranks.rank * elements, (memory.ranks.rank + 1) * elements),
                ranks=memory.ranks,
                trainable=record.trainable,
                persistent=persistent,
                large=layout.is_large(record),
                accumulator_on_host=not persistent and "accumulator" in kinds,
                sum_factor=memory.sum_factor,
                offloaded=memory.streams.event(),
                uploaded=memory.streams.event(),
                updated=memory.streams.event(),
                speculative=AdamStates(**{"master": None, **copies}) if "exp_avg" in copies else copies.get("weight"),
                **states,
            )
        )
    return chunks


def _copied_states(record: ChunkRecord, plan: Plan, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The states of which the chunk of ``record`` has a second copy for speculative updates, with their dtypes."""
    place = record.index - plan.n_persist  # among the chunks in host memory
    if not record.trainable or not 0 <= place < plan.n_speculate:
        return {}
    return {"weight": dtype} if place < plan.n_weight_only else _weight_states(record, plan, dtype)


def _host_bytes(
    layout: Layout,
    plan: Plan,
    dtype: torch.dtype,
    planned: Sequence[Mapping[str, torch.dtype]],
    copied: Sequence[Mapping[str, torch.dtype]],
) -> int:
    """Host memory of all states, their second copies, and the gradients that share memory."""
    sizes = [layout.region_elements(plan.n_persist)[1] * dtype.itemsize] * plan.n_host_gradient
    for record in layout.chunks[plan.n_persist :]:
        for kinds in (planned[record.index], copied[record.index]):
            sizes += state_sizes_bytes(layout.shard_elements(record), kinds)
    return sum(map(whole_pages, sizes))


def complete_chunks(chunks: list[Chunk], layout: Layout, plan: Plan, memory: EngineMemory) -> None:
    """Give the persistent chunks the rest of their states, and others the sums that lie on the device, with zeros.

    Call it when the weights are in place: until then their making may need the memory.
    """
    for chunk in chunks[plan.n_persist :]:
        if chunk.trainable and plan.sums_on_device(chunk.index):
            chunk.accumulator = memory.zeros(chunk.shard_elements, dtype=torch.float32)
    for chunk, record in zip(chunks[: plan.n_persist], layout.chunks[: plan.n_persist], strict=True):
        kinds = planned_states(record, layout, plan, memory.dtype)
        missing = {name: kind for name, kind in kinds.items() if name not in _VALUES}
        vars(chunk).update(_on_device(chunk.shard_elements, missing, memory.device))


def _on_device(elements: int, kinds: Mapping[str, torch.dtype], device: torch.device) -> dict[str, Tensor]:
    """States of ``kinds``, each of ``elements`` elements, side by side in one allocation, with zeros in them."""
    sizes = state_sizes_bytes(elements, kinds)
    parts = torch.zeros(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    return {name: part.view(kind) for (name, kind), part in zip(kinds.items(), parts, strict=True)}


def make_members(
    profile: ModelProfile, layout: Layout, chunks: list[Chunk], parameters: Mapping[str, nn.Parameter]
) -> list[Member]:
    """One member for each parameter of the profile, in definition order. Chunks list theirs in the order of offsets.

    ``parameters`` are those of the model by name.
    """
    members = [
        Member(
            index=slot.parameter,
            name=record.name,
            parameter=parameters[record.name],
            shape=torch.Size(record.shape),
            numel=slot.numel,
            group=record.group,
            chunk=chunks[slot.chunk],
            offset=slot.offset,
        )
        for slot, record in zip(layout.slots, profile.parameters, strict=True)
    ]
    for member in sorted(members, key=lambda member: member.offset):
        member.chunk.parameters[member.index] = member.name
    return members
