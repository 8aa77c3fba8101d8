"""Which parameter lies in which chunk: execution order, one unit together, frozen and trainable apart.

A chunk is the piece in which model states move. Parameters go into chunks in the order in which the forward first needs
them (paper section 3), so that the next chunk to fetch is always the next in line. A tied parameter lies where it is
first used. Frozen parameters have chunks of their own: those have no optimizer states and no gradient, so LoRA costs
what it should.

[Note: how large a chunk is] About a block, or several where blocks are so small that transfers of one would not reach
the link's full rate. Capacity that chunks leave unused costs nothing but in buffers, which are of full size, two of
them for gradients: of four blocks a chunk those of a 40 B GPT-2 take 13 GiB more than of one, and steps (4 x 1024) are
predicted to take 9% longer on an A100, those of LLaMA-2 13 B (8 x 2048) 28% on an H100. Less than a block gains hardly
any memory, since the chunks of a block are needed together, and loses 3% to 11% for most models: what parts of a block
leave unused is in every chunk. Of few blocks parts may be chunks all the same, so that placement has something to
choose from.

[Note: large parameters] The embedding of a large vocabulary, and the head, may be as large as several blocks, and a
parameter lies in one chunk. Were all chunks as large, buffers would be too, and placement would have little to choose
from. So there is a second way: chunks of about a block, and for every larger parameter one of its own. These come
first, since buffers have the size of the largest chunk that passes through them. A chunk that comes before others
without being needed before them, as that of the head does, must persist (``least_persist``): all that passes through
buffers comes in the order in which it is needed. Which way is better, the search finds out.

[Note: which chunks are streamed] The next forward needs chunks in order, so both must come along in that order: of
every k chunks the device gets the last, which has to be there when the host is done with the k - 1 before it. Chunks
that are updated early stay with the host, which does that while backward has the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from protrain.profiler.model_profile import ModelProfile
from protrain.records import Record

ALIGNMENT = 128  # elements: 256 bytes of 16-bit weights, and the unit of every length that a kernel sees
LARGE_CHUNK = 8 * 1024**2  # elements: 16 MiB of 16-bit weights, from where transfers reach the link's full rate
_GRID_STEPS = 32
_LARGE = 1.5  # as large as a chunk of blocks: what gets one of its own where that may be better
_MOST_CHUNKS = 256  # blocks far smaller than the rest of a model do not make thousands of chunks
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
    elements: int  # used length, a multiple of ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class Layout(Record):
    """Every parameter's place. Chunks are in execution order of their first use."""

    chunk_elements: int  # capacity of every chunk but those of one larger parameter
    chunks: tuple[ChunkRecord, ...]
    slots: tuple[Slot, ...]  # one per parameter of the profile, in its order
    unit_chunks: tuple[tuple[int, ...], ...]  # per unit of the profile: the chunks that hold what it uses
    least_persist: int = 0  # so many chunks must persist: see [Note: large parameters]

    @property
    def wasted_elements(self) -> int:
        """Capacity that no parameter uses, over all chunks."""
        return sum(max(0, self.chunk_elements - chunk.elements) for chunk in self.chunks)

    def buffer_elements(self, n_persist: int) -> int:
        """Of a chunk buffer: of the largest chunk that passes through one."""
        return max((chunk.elements for chunk in self.chunks[n_persist:]), default=0)

    def gradient_elements(self, n_persist: int) -> tuple[int, int]:
        """Of the largest gradient of a persistent chunk, and of another."""
        sizes = [chunk.elements if chunk.trainable else 0 for chunk in self.chunks]
        return max(sizes[:n_persist], default=0), max(sizes[n_persist:], default=0)


def align(elements: int) -> int:
    """``elements`` rounded up to a multiple of ALIGNMENT."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def pack(profile: ModelProfile, chunk_elements: int) -> Layout:
    """The layout of ``profile``'s parameters in chunks of ``chunk_elements``.

    A unit's parameters stay together: they go into the current chunk when all of them fit, else into a new one; a unit
    larger than a chunk spreads over several. Inside a unit they are sorted by optimizer group, otherwise as defined.
    A parameter larger than a chunk has one of its own: see [Note: large parameters].

    Raises:
        ValueError: ``chunk_elements`` is no multiple of 128, or none at all.
    """
    if chunk_elements % ALIGNMENT or chunk_elements < ALIGNMENT:
        raise ValueError(f"chunk_elements must be a multiple of {ALIGNMENT} above 0, not {chunk_elements}")
    places, used, trainable, least_persist = _place(_groups(profile), len(profile.parameters), chunk_elements)
    slots = tuple(
        Slot(parameter=index, chunk=chunk, offset=offset, numel=profile.parameters[index].numel)
        for index, (chunk, offset) in enumerate(places)
    )
    chunks = tuple(
        ChunkRecord(index=index, trainable=trainable[index], elements=elements) for index, elements in enumerate(used)
    )
    unit_chunks = tuple(
        tuple(sorted({places[parameter][0] for parameter in unit.parameters})) for unit in profile.units
    )
    return Layout(
        chunk_elements=chunk_elements,
        chunks=chunks,
        slots=slots,
        unit_chunks=unit_chunks,
        least_persist=least_persist,
    )


def chunk_sizes(profile: ModelProfile) -> tuple[int, ...]:
    """What there is to choose from: :func:`choose_chunk_elements`, and before it a size below large parameters."""
    usual = choose_chunk_elements(profile)
    small = _choose(profile, large=_blocks_alone(profile))
    is_better = small * _LARGE <= usual and small * _MOST_CHUNKS >= profile.n_parameters
    return (small, usual) if is_better else (usual,)


def _blocks_alone(profile: ModelProfile) -> int:
    """The largest parameter of a block; of any where there are no blocks."""
    blocks = [unit for unit in profile.units if unit.block is not None] or profile.units
    return max((align(profile.parameters[index].numel) for unit in blocks for index in unit.parameters), default=0)


def choose_chunk_elements(profile: ModelProfile) -> int:
    """The chunk size that wastes least capacity, by packing over a grid (paper section 3); ties go to the smaller.

    The grid holds the sizes of units, their simple multiples and fractions, each also with room for the small units
    between blocks, and even steps, from about a block on: see [Note: how large a chunk is].
    """
    return _choose(profile, large=max((align(parameter.numel) for parameter in profile.parameters), default=0))


def _choose(profile: ModelProfile, *, large: int) -> int:
    """Where parameters of more than ``large`` elements have chunks of their own and are no concern here."""
    groups = [[group.without(larger_than=large) for group in of_unit] for of_unit in _groups(profile)]
    sizes = [sum(group.size for group in of_unit) for of_unit in groups]
    total = sum(sizes)
    if not total:
        return ALIGNMENT
    largest = max(size for of_unit in groups for group in of_unit for _, size in group.members)
    wanted = align(-(-total // _WANTED_CHUNKS))
    blocks = [size for size, unit in zip(sizes, profile.units, strict=True) if unit.block is not None]
    block = max(blocks, default=wanted)
    lower = max(largest, min(block, max(wanted, LARGE_CHUNK)))
    upper = max(lower + lower // 4, block, min(wanted, LARGE_CHUNK))
    candidates = {lower}
    for size in {size for size in sizes if size}:
        small = sum(other for other in sizes if other * 16 <= size)
        for numerator, denominator in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4)):
            part = align(-(-size * numerator // denominator))
            candidates.update((part, part + small))
    candidates.update(align(lower + (upper - lower) * step // _GRID_STEPS) for step in range(_GRID_STEPS + 1))
    # What the last chunk wastes when all before it are full; no packing needs fewer chunks.
    least = [(elements * -(-total // elements) - total, elements) for elements in candidates]
    best = (float("inf"), 0)
    for waste, elements in sorted(pair for pair in least if lower <= pair[1] <= upper):
        if (waste, elements) > best:
            break
        _, used, *_ = _place(groups, len(profile.parameters), elements)
        best = min(best, (elements * len(used) - sum(used), elements))
    return best[1]


class _Group(NamedTuple):
    """Parameters that one unit uses before any other does, trainable or frozen all of them."""

    trainable: bool
    members: list[tuple[int, int]]  # parameter and its aligned size, sorted by optimizer group

    @property
    def size(self) -> int:
        """Of all of them."""
        return sum(size for _, size in self.members)

    def without(self, *, larger_than: int) -> _Group:
        """The same without large ones."""
        return _Group(self.trainable, [member for member in self.members if member[1] <= larger_than])


def _groups(profile: ModelProfile) -> list[list[_Group]]:
    """Per unit; kinds by first use inside it, so that chunks stay in execution order whichever kind comes first."""
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
    groups: list[list[_Group]], n_parameters: int, chunk_elements: int
) -> tuple[list[tuple[int, int]], list[int], list[bool], int]:
    """(chunk, offset) per parameter; per chunk its used elements and whether it is trainable; ``least_persist``."""
    places = [(-1, -1)] * n_parameters
    used: list[int] = []
    trainable: list[bool] = []
    least_persist = 0
    is_first = True  # nothing but large parameters is needed before
    for of_unit in groups:
        for group in of_unit:
            for index, size in group.members:
                if size > chunk_elements:
                    places[index] = len(used), 0
                    used.append(size)
                    trainable.append(group.trainable)
                    least_persist = least_persist if is_first else len(used)
        is_first = is_first and all(size > chunk_elements for group in of_unit for _, size in group.members)
    current: dict[bool, int] = {}
    for kind, members in chain.from_iterable(groups):
        rest = [(index, size) for index, size in members if size <= chunk_elements]
        room = chunk_elements - used[current[kind]] if kind in current else -1
        fresh = sum(size for _, size in rest) > room
        for index, size in rest:
            if fresh or used[current[kind]] + size > chunk_elements:
                current[kind] = len(used)
                used.append(0)
                trainable.append(kind)
                fresh = False
            places[index] = (current[kind], used[current[kind]])
            used[current[kind]] += size
    return places, used, trainable, least_persist


def updated_chunks(profile: ModelProfile, layout: Layout) -> list[int]:
    """Chunks that a step updates: trainable ones that a unit uses, for no gradient comes otherwise."""
    used = {
        chunk
        for unit in profile.calls
        for member in (unit, *profile.units[unit].within)
        for chunk in layout.unit_chunks[member]
    }
    return [chunk.index for chunk in layout.chunks if chunk.trainable and chunk.index in used]


def streamed_chunks(candidates: Sequence[int], n_stream: int) -> list[int]:
    """``n_stream`` of ``candidates``, evenly. See [Note: which chunks are streamed]."""
    return [candidates[-(-nth * len(candidates) // n_stream) - 1] for nth in range(1, n_stream + 1)]
