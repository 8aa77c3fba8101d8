"""Which parameter lies in which chunk: execution order, one unit together, frozen and trainable apart.

A chunk is the piece in which model states move. Parameters go into chunks in the order in which the forward first needs
them (paper section 3), so that the next chunk to fetch is always the next in line. A tied parameter lies where it is
first used. Frozen parameters have chunks of their own: those have no optimizer states and no gradient, so LoRA costs
what it should.

[Note: how large a chunk is] About a block, or several where blocks are so small that transfers of one would not reach
the link's full rate. Capacity that chunks leave unused costs nothing but in buffers, which are of full size, two of
them for gradients: of four blocks a chunk those of a 40 B GPT-2 take 13 GiB more than of one, steps of it are predicted
to take 9% longer on an A100, and those of LLaMA-2 13 B 28% on an H100. Less than a block gains hardly any memory, since
the chunks of a block are needed together, and loses 3% to 11% for most models: what parts of a block leave unused is
in every chunk. Of few blocks parts may be chunks all the same, so that placement has something to choose from.

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

    chunk_elements: int  # capacity of every chunk: the size of a chunk buffer
    chunks: tuple[ChunkRecord, ...]
    slots: tuple[Slot, ...]  # one per parameter of the profile, in its order
    unit_chunks: tuple[tuple[int, ...], ...]  # per unit of the profile: the chunks that hold what it uses

    @property
    def wasted_elements(self) -> int:
        """Capacity that no parameter uses, over all chunks."""
        return sum(self.chunk_elements - chunk.elements for chunk in self.chunks)


def align(elements: int) -> int:
    """``elements`` rounded up to a multiple of ALIGNMENT."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def pack(profile: ModelProfile, chunk_elements: int) -> Layout:
    """The layout of ``profile``'s parameters in chunks of ``chunk_elements``.

    A unit's parameters stay together: they go into the current chunk when all of them fit, else into a new one; a unit
    larger than a chunk spreads over several. Inside a unit they are sorted by optimizer group, otherwise as defined.

    Raises:
        ValueError: ``chunk_elements`` is no multiple of 128 or smaller than the largest parameter.
    """
    largest = max((align(parameter.numel) for parameter in profile.parameters), default=ALIGNMENT)
    if chunk_elements % ALIGNMENT or chunk_elements < largest:
        raise ValueError(
            f"chunk_elements must be a multiple of {ALIGNMENT} and at least {largest} "
            f"(the largest parameter), not {chunk_elements}"
        )
    places, used, trainable = _place(_groups(profile), len(profile.parameters), chunk_elements)
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
    return Layout(chunk_elements=chunk_elements, chunks=chunks, slots=slots, unit_chunks=unit_chunks)


def choose_chunk_elements(profile: ModelProfile) -> int:
    """The chunk size that wastes least capacity, by packing over a grid (paper section 3); ties go to the smaller.

    The grid holds the sizes of units, their simple multiples and fractions, each also with room for the small units
    between blocks, and even steps, from about a block on: see [Note: how large a chunk is].
    """
    if not profile.parameters:
        return ALIGNMENT
    groups = _groups(profile)
    sizes = [sum(size for group in of_unit for _, size in group.members) for of_unit in groups]
    total = sum(sizes)
    largest = max(align(parameter.numel) for parameter in profile.parameters)
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
        _, used, _ = _place(groups, len(profile.parameters), elements)
        best = min(best, (elements * len(used) - sum(used), elements))
    return best[1]


class _Group(NamedTuple):
    """Parameters that one unit uses before any other does, trainable or frozen all of them."""

    trainable: bool
    members: list[tuple[int, int]]  # parameter and its aligned size, sorted by optimizer group
    size: int


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
            of_unit.append(_Group(trainable, members, sum(size for _, size in members)))
        result.append(of_unit)
    assert len(taken) == len(profile.parameters), "a parameter belongs to no unit"
    return result


def _place(
    groups: list[list[_Group]], n_parameters: int, chunk_elements: int
) -> tuple[list[tuple[int, int]], list[int], list[bool]]:
    """(chunk, offset) per parameter, and per chunk its used elements and whether it is trainable."""
    places = [(-1, -1)] * n_parameters
    used: list[int] = []
    trainable: list[bool] = []
    current: dict[bool, int] = {}
    for kind, members, group_size in chain.from_iterable(groups):
        room = chunk_elements - used[current[kind]] if kind in current else -1
        fresh = group_size > room
        for index, size in members:
            if fresh or used[current[kind]] + size > chunk_elements:
                current[kind] = len(used)
                used.append(0)
                trainable.append(kind)
                fresh = False
            places[index] = (current[kind], used[current[kind]])
            used[current[kind]] += size
    return places, used, trainable


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
