"""Which parameter lies in which chunk: execution order, one unit together, frozen and trainable apart.

A chunk is the piece in which model states are transferred. Parameters go into chunks in the order in which the forward
first needs them (paper section 3), so that the next chunk to fetch is always the next in line. A tied parameter lies
where it is first used. Frozen parameters have chunks of their own, without optimizer states and gradient, so LoRA costs
what it should.

[Note: how large a chunk is] A chunk is about as large as a block, or as several blocks if blocks are so small that the
transfer of one would not reach the link's full rate. Capacity that chunks leave unused costs memory only in buffers,
which have the full size of a chunk, two of them for gradients. Larger chunks make buffers larger: with four blocks a
chunk, the buffers of a 40 B GPT-2 take 13 GiB more than with one, and its steps (4 x 1024) are predicted to take 9%
longer on an A100; steps of LLaMA-2 13 B (8 x 2048) 28% longer on an H100. Chunks smaller than a block gain hardly any
memory, since the chunks of a block are needed together, and every chunk has some capacity that its part of a block
leaves unused. They make steps 3% to 11% longer for most models. A model of few blocks may still have parts of blocks as
chunks, so that placement has something to choose from.

[Note: large parameters] The embedding of a large vocabulary, and the head, may be as large as several blocks, and a
parameter lies in one chunk. If all chunks were as large, all buffers would be, and placement would have little to
choose from. So chunks have about the size of a block, and every larger parameter has a chunk of its own, a large chunk.
Large chunks have buffers of their own, no more than are held at one time (one, if embedding and head are two units).
They have staging of their own for gradients, and a region of host memory each for gradients. They lie where they
are first used, as all chunks do. An order with large chunks before all others, so that they would persist first, was
measured and gained nothing: see docs/results/appendix.md.

[Note: shards] When several ranks train together, each of them owns one shard of every chunk, and all shards of a chunk
have the same size. So a chunk is padded at its end to a multiple of ALIGNMENT elements for every rank. Which parameter
lies in which chunk at which offset does not depend on the number of ranks, because that order decides in which order
the gradient's norm is summed, and the norm must have the same bits on any number of ranks. The states of a chunk are a
rank's shard of them, on the device for the first n_persist chunks and in host memory for the others. The whole weight
of every chunk, persistent or not, passes through the chunk buffers. With one rank the shard of a chunk is the chunk,
and the weight of a persistent chunk needs no buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from protrain.common.records import Record
from protrain.profiler.model_profile import ModelProfile

ALIGNMENT = 128  # elements: 256 bytes of 16-bit weights, and the unit of every length that a kernel sees
# Gradients are flattened into one buffer while the other is offloaded. Those of large chunks have one buffer more.
STAGING_BUFFERS = 2
# Sums in host memory pass through so many buffers, of at most so many elements. While one is on its way down, one is on
# its way up, and the third waits for neither. The driver of CUDA holds 28 such copies of a stream, and blocks the
# thread that issues another. Until then that thread cannot issue the backward of the next unit. With parts of 32 MiB,
# a head of 545 M parameters blocked it for 70 to 87 ms a batch of 8 x 1024 tokens (H200, torch 2.11, driver 580). Two
# chunks of 233 M parameters have 28 parts of 64 MiB. What these save has not been measured yet.
SUM_BUFFERS, _SUM_ELEMENTS = 3, 1 << 24
TILE_ELEMENTS = 16384  # the gradient norm has one partial sum for each tile of so many elements of a parameter
PARTIAL_BYTES = 4  # a partial sum in fp32
FULL_RATE_ELEMENTS = 8 * 1024**2  # 16 MiB of 16-bit weights, whose transfer reaches the link's full rate
_GRID_STEPS = 32
_LEAST_SHRINKAGE = 1.5  # parameters have chunks of their own only if usual chunks are this many times smaller then
_MOST_CHUNKS = 256  # and only if there are no more chunks than this, as there would be if blocks were tiny
_WANTED_CHUNKS = 8  # a small model still gets about this many, so that placement has something to choose from


@dataclass(frozen=True, kw_only=True)
class Slot(Record):
    """Where one parameter lies."""

    parameter: int  # index into ModelProfile.parameters
    chunk: int
    offset: int  # elements from the chunk's start, a multiple of ALIGNMENT
    numel: int


@dataclass(frozen=True, kw_only=True)
class ChunkRecord(Record):
    """One chunk."""

    index: int
    trainable: bool
    elements: int  # used length, a multiple of ALIGNMENT for every rank: see [Note: shards]


@dataclass(frozen=True, kw_only=True)
class Layout(Record):
    """Every parameter's place. Chunks are in execution order of their first use."""

    chunk_elements: int  # capacity of every chunk that is not large
    chunks: tuple[ChunkRecord, ...]
    slots: tuple[Slot, ...]  # one per parameter of the profile, in its order
    unit_chunks: tuple[tuple[int, ...], ...]  # per unit of the profile: the chunks that hold what it uses
    world_size: int = 1  # ranks that train together, each with one shard of every chunk

    def is_large(self, chunk: ChunkRecord) -> bool:
        """Whether ``chunk`` holds one parameter that is larger than other chunks: see [Note: large parameters].

        A parameter that is larger only until both are padded for several ranks fits a usual buffer, and is not large.
        """
        return chunk.elements > self._usual_elements

    def shard_elements(self, chunk: ChunkRecord) -> int:
        """The elements of ``chunk`` that one rank owns."""
        return chunk.elements // self.world_size

    @property
    def usual_shard_elements(self) -> int:
        """The capacity of one rank's shard of a chunk that is not large."""
        return self._usual_elements // self.world_size

    @property
    def _usual_elements(self) -> int:
        """The most elements of a chunk that is not large, padded for all ranks."""
        return align(self.chunk_elements, self.world_size)

    def held_by(self, units: Iterable[int]) -> tuple[int, ...]:
        """The chunks that hold what any of ``units`` uses, in ascending order."""
        return tuple(sorted({chunk for unit in units for chunk in self.unit_chunks[unit]}))

    def first_buffered(self, n_persist: int) -> int:
        """The first chunk whose weight passes through buffers: the first of all if several ranks have its shards."""
        return n_persist if self.world_size == 1 else 0

    def buffer_elements(self, n_persist: int) -> tuple[int, int]:
        """The size of a chunk buffer, and of a buffer for large chunks; 0 if no chunk needs one."""
        return _largest(self, self.chunks[self.first_buffered(n_persist) :])

    def gradient_elements(self, n_persist: int, n_device_sum: int = 0) -> tuple[int, int]:
        """The size of the largest shard of a gradient that is offloaded, among usual chunks and among large chunks.

        Chunks whose sums are on the device are left out.
        """
        kept = summed_on_device(len(self.chunks), n_persist, n_device_sum)
        away = [chunk for chunk in self.chunks[n_persist:] if chunk.trainable and chunk.index not in kept]
        usual, large = _largest(self, away)
        return usual // self.world_size, large // self.world_size

    def reduction_elements(self) -> tuple[int, int]:
        """The size of the largest whole gradient that ranks reduce, among usual chunks and among large chunks.

        Both are 0 with one rank, which reduces nothing.
        """
        return _largest(self, [chunk for chunk in self.chunks if chunk.trainable and self.world_size > 1])

    def lane_elements(self, n_persist: int, n_device_sum: int | None) -> tuple[int, int]:
        """The sizes of staging memory for shards of gradients, for usual chunks and for large ones.

        Several ranks leave the gradient of any sum there, of which nothing but its squares is needed.

        Args:
            n_persist: the persistent chunks.
            n_device_sum: the chunks in host memory whose sums are on the device. None: a step has one backward.
        """
        if n_device_sum is None or self.world_size == 1:
            return self.gradient_elements(n_persist)
        usual, large = self.reduction_elements()
        return usual // self.world_size, large // self.world_size

    def sum_elements(self, n_persist: int, n_device_sum: int | None) -> int:
        """The size of a buffer that parts of sums in host memory pass through. The arguments are ``lane_elements``'."""
        if n_device_sum is None:
            return 0
        return min(_SUM_ELEMENTS, max(self.gradient_elements(n_persist, n_device_sum)))

    def staging_bytes(self, n_persist: int, element_bytes: int, n_device_sum: int | None = None) -> int:
        """The device memory that gradients pass through on their way to other ranks and to the host.

        Usual chunks have STAGING_BUFFERS whole gradients to send to other ranks from, one that is received from them,
        and STAGING_BUFFERS shards that are offloaded. Large chunks have one of each. With one rank nothing is sent.
        Sums in host memory pass through SUM_BUFFERS buffers. The arguments are those of ``lane_elements``.
        """
        (sent, large_sent), (shard, large_shard) = (
            self.reduction_elements(),
            self.lane_elements(n_persist, n_device_sum),
        )
        whole = (STAGING_BUFFERS + 1) * sent + 2 * large_sent
        staged_bytes = element_bytes * (whole + STAGING_BUFFERS * shard + large_shard)
        return staged_bytes + 4 * SUM_BUFFERS * self.sum_elements(n_persist, n_device_sum)

    def region_elements(self, n_persist: int) -> tuple[int, int]:
        """The size of a region that gradients share, on the device, and in host memory (not for large chunks)."""
        here = max((self.shard_elements(chunk) for chunk in self.chunks[:n_persist] if chunk.trainable), default=0)
        return here, self.gradient_elements(n_persist)[0]

    @property
    def n_tiles(self) -> int:
        """The number of tiles of all trainable parameters: of partial sums of the gradient norm."""
        return sum(-(-slot.numel // TILE_ELEMENTS) for slot in self.slots if self.chunks[slot.chunk].trainable)

    def cut_tiles(self) -> list[tuple[int, int]]:
        """The tiles of trainable parameters that lie in the shards of several ranks, as (parameter, tile of it).

        They come in the order of chunks and offsets. No rank has all elements of such a tile, so ranks exchange them
        before its partial sum of the gradient norm can be computed.
        """
        found = set()
        for slot in self.slots:
            chunk = self.chunks[slot.chunk]
            shard = self.shard_elements(chunk)
            first = (slot.offset // shard + 1) * shard
            for boundary in range(first, slot.offset + slot.numel, shard) if chunk.trainable else ():
                tile, cut = divmod(boundary - slot.offset, TILE_ELEMENTS)
                if cut:
                    found.add((slot.chunk, slot.offset, slot.parameter, tile))
        return [(parameter, tile) for _, _, parameter, tile in sorted(found)]

    def exchange_bytes(self, element_bytes: int) -> int:
        """Device memory in which ranks exchange partial sums of the norm, and the values of the tiles that are cut.

        ``element_bytes`` are those of one element of the gradient.
        """
        own = PARTIAL_BYTES * self.n_tiles + element_bytes * TILE_ELEMENTS * len(self.cut_tiles())
        return own if self.world_size == 1 else 2 * own  # what the rank has itself, and what it has from all


@cache
def summed_on_device(n_chunks: int, n_persist: int, n_device_sum: int) -> frozenset[int]:
    """The ``n_device_sum`` chunks in host memory whose sums of several backwards are on the device.

    They are spread evenly, and the first chunk in host memory, which backward reaches last, is one of them. A sum in
    host memory takes longer on the link than its unit takes to compute. So the link catches up while backward computes
    a unit whose sum is on the device, and has little left to do when backward ends.
    """
    n_offloaded = n_chunks - n_persist
    return frozenset(
        n_chunks - 1 - at  # in the order of backward
        for at in range(n_offloaded)
        if (at + 1) * n_device_sum // n_offloaded > at * n_device_sum // n_offloaded
    )


def _largest(layout: Layout, chunks: Iterable[ChunkRecord]) -> tuple[int, int]:
    """Elements of the largest usual chunk and of the largest large chunk, 0 if there is none."""
    sizes, most = [chunk.elements for chunk in chunks], layout._usual_elements
    largest = max(sizes, default=0)
    if largest <= most:
        return largest, 0
    return max((size for size in sizes if size <= most), default=0), largest


def align(elements: int, n_shards: int = 1) -> int:
    """``elements`` rounded up to a multiple of ALIGNMENT for each of ``n_shards``."""
    multiple = ALIGNMENT * n_shards
    return -(-elements // multiple) * multiple


def pack(profile: ModelProfile, chunk_elements: int | None = None, world_size: int = 1) -> Layout:
    """The layout of ``profile``'s parameters in chunks of ``chunk_elements``, in shards for ``world_size`` ranks.

    A unit's parameters stay together. They go into the current chunk if all of them fit, else into a new one, and a
    unit larger than a chunk spreads over several. Inside a unit, parameters are sorted by optimizer group and then by
    definition. A parameter larger than a chunk has a large chunk of its own: see [Note: large parameters].
    ``chunk_elements`` is by default chosen by ``choose_chunk_elements``. See [Note: shards] for several ranks.

    Raises:
        ValueError: ``chunk_elements`` is not a positive multiple of 128.
    """
    if chunk_elements is None:
        chunk_elements = choose_chunk_elements(profile)
    if chunk_elements % ALIGNMENT or chunk_elements < ALIGNMENT:
        raise ValueError(f"chunk_elements must be a multiple of {ALIGNMENT} above 0, not {chunk_elements}")
    groups = list(chain.from_iterable(_groups(profile)))
    places, used, trainable = _place(groups, len(profile.parameters), chunk_elements)
    slots = tuple(
        Slot(parameter=index, chunk=chunk, offset=offset, numel=profile.parameters[index].numel)
        for index, (chunk, offset) in enumerate(places)
    )
    chunks = tuple(
        ChunkRecord(index=index, trainable=trainable[index], elements=align(elements, world_size))
        for index, elements in enumerate(used)
    )
    unit_chunks = tuple(
        tuple(sorted({places[parameter][0] for parameter in unit.parameters})) for unit in profile.units
    )
    return Layout(
        chunk_elements=chunk_elements, chunks=chunks, slots=slots, unit_chunks=unit_chunks, world_size=world_size
    )


def choose_chunk_elements(profile: ModelProfile) -> int:
    """The chunk size that wastes the least capacity, by packing over a grid (paper section 3); ties go to the smaller.

    The grid holds the sizes of units, each also with room for the small units between blocks, and even steps. It begins
    at about the size of a block: see [Note: how large a chunk is].
    Parameters that are much larger than such a chunk do not count: see [Note: large parameters].
    """
    usual = _choose(profile, large=max((align(parameter.numel) for parameter in profile.parameters), default=0))
    in_blocks = [unit for unit in profile.units if unit.block is not None] or profile.units
    sizes = (align(profile.parameters[index].numel) for unit in in_blocks for index in unit.parameters)
    small = _choose(profile, large=max(sizes, default=0))
    is_better = small * _LEAST_SHRINKAGE <= usual and small * _MOST_CHUNKS >= profile.n_parameters
    return small if is_better else usual


def _choose(profile: ModelProfile, *, large: int) -> int:
    """The best chunk size for the parameters of up to ``large`` elements. Larger ones have chunks of their own."""
    by_unit = [[group.up_to(large) for group in of_unit] for of_unit in _groups(profile)]
    groups = list(chain.from_iterable(by_unit))
    sizes = [sum(group.size for group in of_unit) for of_unit in by_unit]
    total = sum(sizes)
    if not total:
        return ALIGNMENT
    largest = max(size for group in groups for _, size in group.members)
    wanted = align(-(-total // _WANTED_CHUNKS))
    blocks = [size for size, unit in zip(sizes, profile.units, strict=True) if unit.block is not None]
    block = max(blocks, default=wanted)
    lower = max(largest, min(block, max(wanted, FULL_RATE_ELEMENTS)))
    upper = max(lower + lower // 4, block, min(wanted, FULL_RATE_ELEMENTS))
    candidates = {lower}
    for size in {size for size in sizes if size}:
        candidates.update((size, size + sum(other for other in sizes if other * 16 <= size)))
    candidates.update(align(lower + (upper - lower) * step // _GRID_STEPS) for step in range(_GRID_STEPS + 1))

    def wasted(elements: int) -> tuple[int, int]:
        _, used, _ = _place(groups, len(profile.parameters), elements)
        return elements * len(used) - sum(used), elements

    return min((elements for elements in candidates if lower <= elements <= upper), key=wasted)


class _Group(NamedTuple):
    """Parameters that one unit is the first to use. All of them are trainable, or all are frozen."""

    trainable: bool
    members: list[tuple[int, int]]  # (parameter, aligned size), sorted by optimizer group

    @property
    def size(self) -> int:
        """Elements of all members."""
        return sum(size for _, size in self.members)

    def up_to(self, largest: int) -> _Group:
        """The group of the members of at most that size."""
        return _Group(self.trainable, [member for member in self.members if member[1] <= largest])


def _groups(profile: ModelProfile) -> list[list[_Group]]:
    """The groups of every unit. The group whose parameters are used first comes first, to keep execution order."""
    taken: set[int] = set()
    result = []
    for unit in profile.units:
        owned = [index for index in dict.fromkeys(unit.parameters) if index not in taken]
        taken.update(owned)
        groups = {index: profile.parameters[index].group for index in owned}
        of_unit = []
        for trainable in dict.fromkeys(groups[index] >= 0 for index in sorted(owned)):
            members = [
                (index, align(profile.parameters[index].numel))
                for index in sorted(owned, key=groups.__getitem__)
                if (groups[index] >= 0) is trainable
            ]
            of_unit.append(_Group(trainable, members))
        result.append(of_unit)
    assert len(taken) == len(profile.parameters), "a parameter belongs to no unit"
    return result


def _place(
    groups: Iterable[_Group], n_parameters: int, chunk_elements: int
) -> tuple[list[tuple[int, int]], list[int], list[bool]]:
    """(chunk, offset) of every parameter, and the used elements of every chunk and whether it is trainable."""
    places = [(-1, -1)] * n_parameters
    used: list[int] = []
    trainable: list[bool] = []
    current: dict[bool, int] = {}
    for kind, members in groups:
        room = chunk_elements - used[current[kind]] if kind in current else -1
        fresh = sum(size for _, size in members if size <= chunk_elements) > room
        for index, size in members:
            chunk = len(used)
            if size <= chunk_elements:
                if fresh or used[current[kind]] + size > chunk_elements:
                    current[kind], fresh = chunk, False
                chunk = current[kind]
            if chunk == len(used):
                used.append(0)
                trainable.append(kind)
            places[index] = (chunk, used[chunk])
            used[chunk] += size
    return places, used, trainable


def updated_chunks(profile: ModelProfile, layout: Layout) -> list[int]:
    """The chunks that a step updates: trainable ones that a unit uses. Others get no gradient."""
    used = layout.held_by(member for unit in profile.calls for member in (unit, *profile.units[unit].within))
    return [chunk.index for chunk in layout.chunks if chunk.trainable and chunk.index in used]
