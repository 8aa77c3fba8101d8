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
parameter lies in one chunk. Were all chunks as large, so would be all buffers, and placement would have little to
choose from. So chunks are of about a block, and every larger parameter has one of its own, a large chunk. These have
buffers of their own, no more than the units active at one time need (one, where embedding and head are two units),
staging of their own for gradients, and in host memory room for these that no other chunk takes turns in. All that is
needed only while not all of them persist, and the head is the last chunk. So there are two orders to choose from: large
chunks where they are first used, or before all others, so that they persist first, or else are updated first: the
gradient of the head is the first to come. The search tries both.

[Note: which chunks are streamed] The next forward needs chunks in order, so both must come along in that order: of
every k chunks the device gets the last, which has to be there when the host is done with the k - 1 before it. Chunks
that are updated early stay with the host, which does that while backward has the link.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from protrain.common.records import Record
from protrain.profiler.model_profile import ModelProfile, UnitRecord

ALIGNMENT = 128  # elements: 256 bytes of 16-bit weights, and the unit of every length that a kernel sees
# Gradients are flattened into one while the other is offloaded; those of large chunks into one more.
STAGING_BUFFERS = 2
LARGE_CHUNK = 8 * 1024**2  # elements: 16 MiB of 16-bit weights, from where transfers reach the link's full rate
_GRID_STEPS = 32
_LARGE = 1.5  # as large as a chunk of blocks: the largest parameter from where such have chunks of their own
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
    """Every parameter's place. Chunks are in execution order of their first use, or large ones first."""

    chunk_elements: int  # capacity of every chunk but those of one larger parameter
    chunks: tuple[ChunkRecord, ...]
    slots: tuple[Slot, ...]  # one per parameter of the profile, in its order
    unit_chunks: tuple[tuple[int, ...], ...]  # per unit of the profile: the chunks that hold what it uses
    large_first: bool = False  # before chunks that are needed earlier

    @property
    def wasted_elements(self) -> int:
        """Capacity that no parameter uses, over all chunks."""
        return sum(max(0, self.chunk_elements - chunk.elements) for chunk in self.chunks)

    def is_large(self, chunk: ChunkRecord) -> bool:
        """Whether it is of one larger parameter: see [Note: large parameters]."""
        return chunk.elements > self.chunk_elements

    def buffer_elements(self, n_persist: int) -> tuple[int, int]:
        """Of a chunk buffer, and of one for large chunks: the largest chunk that passes through one; 0: none does."""
        return _largest(self, self.chunks[n_persist:])

    def gradient_elements(self, n_persist: int) -> tuple[int, int]:
        """Of the largest gradient of a chunk that does not persist, and of a large one."""
        return _largest(self, [chunk for chunk in self.chunks[n_persist:] if chunk.trainable])

    def region_elements(self, n_persist: int) -> tuple[int, int]:
        """Of a region that gradients of persistent chunks share, and of one for those of others but large ones."""
        here = max((chunk.elements for chunk in self.chunks[:n_persist] if chunk.trainable), default=0)
        return here, self.gradient_elements(n_persist)[0]


def _largest(layout: Layout, chunks: Iterable[ChunkRecord]) -> tuple[int, int]:
    sizes = {False: 0, True: 0}
    for chunk in chunks:
        sizes[layout.is_large(chunk)] = max(sizes[layout.is_large(chunk)], chunk.elements)
    return sizes[False], sizes[True]


def align(elements: int) -> int:
    """``elements`` rounded up to a multiple of ALIGNMENT."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def pack(profile: ModelProfile, chunk_elements: int, *, large_first: bool = False) -> Layout:
    """The layout of ``profile``'s parameters in chunks of ``chunk_elements``.

    A unit's parameters stay together: they go into the current chunk when all of them fit, else into a new one; a unit
    larger than a chunk spreads over several. Inside a unit they are sorted by optimizer group, otherwise as defined.
    A parameter larger than a chunk has one of its own, with ``large_first`` before all others: see [Note: large
    parameters].

    Raises:
        ValueError: ``chunk_elements`` is no multiple of 128, or none at all.
    """
    if chunk_elements % ALIGNMENT or chunk_elements < ALIGNMENT:
        raise ValueError(f"chunk_elements must be a multiple of {ALIGNMENT} above 0, not {chunk_elements}")
    groups = list(chain.from_iterable(_groups(profile)))
    if large_first:
        large = [group.some(lambda size: size > chunk_elements) for group in groups]
        groups = [*large, *(group.some(lambda size: size <= chunk_elements) for group in groups)]
    places, used, trainable = _place(groups, len(profile.parameters), chunk_elements)
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
        chunk_elements=chunk_elements, chunks=chunks, slots=slots, unit_chunks=unit_chunks, large_first=large_first
    )


def layouts(profile: ModelProfile, chunk_elements: int | None = None) -> tuple[Layout, ...]:
    """What there is to choose from: in execution order, and where that is something else with large chunks first.

    ``chunk_elements`` is by default the one of :func:`choose_chunk_elements`.
    """
    size = chunk_elements or choose_chunk_elements(profile)
    in_order, large_first = (pack(profile, size, large_first=first) for first in (False, True))
    return (in_order,) if in_order.slots == large_first.slots else (in_order, large_first)


def _blocks_alone(profile: ModelProfile) -> int:
    """The largest parameter of a block; of any where there are no blocks."""
    blocks = [unit for unit in profile.units if unit.block is not None] or profile.units
    return max((align(profile.parameters[index].numel) for unit in blocks for index in unit.parameters), default=0)


def choose_chunk_elements(profile: ModelProfile) -> int:
    """The chunk size that wastes least capacity, by packing over a grid (paper section 3); ties go to the smaller.

    The grid holds the sizes of units, their simple multiples and fractions, each also with room for the small units
    between blocks, and even steps, from about a block on: see [Note: how large a chunk is]. Parameters that are much
    larger than such a chunk have no say in it: see [Note: large parameters].
    """
    usual = _choose(profile, large=max((align(parameter.numel) for parameter in profile.parameters), default=0))
    small = _choose(profile, large=_blocks_alone(profile))
    is_better = small * _LARGE <= usual and small * _MOST_CHUNKS >= profile.n_parameters
    return small if is_better else usual


def _choose(profile: ModelProfile, *, large: int) -> int:
    """Where parameters of more than ``large`` elements have chunks of their own and are no concern here."""
    by_unit = [[group.some(lambda size: size <= large) for group in of_unit] for of_unit in _groups(profile)]
    groups = list(chain.from_iterable(by_unit))
    sizes = [sum(group.size for group in of_unit) for of_unit in by_unit]
    total = sum(sizes)
    if not total:
        return ALIGNMENT
    largest = max(size for group in groups for _, size in group.members)
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

    def some(self, have: Callable[[int], bool]) -> _Group:
        """Those of such a size."""
        return _Group(self.trainable, [member for member in self.members if have(member[1])])


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
    groups: Iterable[_Group], n_parameters: int, chunk_elements: int
) -> tuple[list[tuple[int, int]], list[int], list[bool]]:
    """(chunk, offset) per parameter; per chunk its used elements and whether it is trainable."""
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


def _prefix(unit: UnitRecord) -> str:
    """Of the names of all modules in that of ``unit``, a dot behind each."""
    return f"{unit.name}." if unit.name else ""


def most_held(profile: ModelProfile, layout: Layout) -> list[tuple[int, int]]:
    """By n_persist: the most other chunks that the units active at one time hold, and of large ones.

    Where a unit would be called that the trace did not call, all whose modules enclose its own are taken to be active.
    """
    called = set(profile.calls)
    chains = set()
    for index, unit in enumerate(profile.units):
        active = (index, *unit.within)
        if index not in called:
            active = tuple(at for at, other in enumerate(profile.units) if f"{unit.name}.".startswith(_prefix(other)))
        chains.add(tuple(sorted({chunk for member in active for chunk in layout.unit_chunks[member]})))
    usual, large = (
        [[chunk for chunk in chain if layout.is_large(layout.chunks[chunk]) is kind] for chain in chains]
        for kind in (False, True)
    )

    def most(held: list[list[int]], n_persist: int) -> int:
        return max((len(chain) - bisect_left(chain, n_persist) for chain in held), default=0)

    return [(most(usual, n_persist), most(large, n_persist)) for n_persist in range(len(layout.chunks) + 1)]


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
