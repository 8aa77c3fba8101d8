"""Where each saved tensor goes in a packed buffer: pure arithmetic on shapes, strides and addresses.

Views of one storage whose bytes overlap share one *memory*: a run of bytes that comes back as one allocation, with the
views on it. What is packed of a memory is its *pieces*:

- the whole run, once, where the views cover it (a fused projection and its slices, a tensor and its transpose);
- each view by itself, its elements in row-major order, where that is less (one column of a large matrix).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protrain_kernels.strided import collapsed, overlaps_itself

RAW, GATHER, BITS = 0, 1, 2
TILE = 4096  # elements of one program, but for RAW
RAW_TILE = 65536  # bytes
PIECE_ALIGNMENT_BYTES = 128  # of a piece in the buffer, raw ones apart
MEMORY_ALIGNMENT_BYTES = 256  # of a memory in its storage: views keep their addresses modulo this
_RAW_ALIGNMENT_BYTES = 16

Signature = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int, int], ...]


def signature_of(tensors: Sequence[torch.Tensor]) -> Signature:
    """Shape, stride, type, device, storage (the first tensor on it) and offset of each: what a plan depends on."""
    first_on: dict[int, int] = {}
    found = []
    for index, tensor in enumerate(tensors):
        dtype, offset = tensor.dtype, int(tensor.storage_offset())
        storage = first_on.setdefault(tensor.data_ptr() - offset * dtype.itemsize, index)
        found.append((tensor.shape, tensor.stride(), dtype, tensor.device, storage, offset))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Memory:
    """A run of bytes of one storage that comes back as one allocation."""

    start_bytes: int  # in the storage
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Something packed: ``sizes`` and ``strides`` (in elements) from ``start_bytes`` of its storage; bytes when RAW."""

    kind: int
    tensor: int  # one on its storage
    memory: int
    start_bytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    numel: int
    offset_bytes: int  # in the buffer

    @property
    def tiles(self) -> int:
        """How many programs work on it."""
        return -(-self.numel // (RAW_TILE if self.kind == RAW else TILE))

    @property
    def packed_bytes(self) -> int:
        """Its bytes in the buffer."""
        return -(-self.numel // 8) if self.kind == BITS else self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor lies in what comes back; ``memory`` is -1 for one without elements."""

    memory: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """The distinct elements that one or more of the tensors are views of."""

    tensor: int
    start_bytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kind: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def end_bytes(self) -> int:
        steps = zip(self.sizes, self.strides, strict=True)
        return self.start_bytes + self.dtype.itemsize * (1 + sum((size - 1) * step for size, step in steps))

    @property
    def shares(self) -> bool:
        """Whether two of its positions may be one element."""
        return overlaps_itself(self.sizes, self.strides)

    @property
    def covers(self) -> bool:
        """Whether it leaves no gap between its start and its end, in whatever order it goes."""
        return not self.shares and self.numel * self.dtype.itemsize == self.end_bytes - self.start_bytes


@dataclass(frozen=True, slots=True)
class PackLayout:
    """The result of ``lay_out``."""

    memories: list[Memory]
    pieces: list[Piece]
    views: list[View]
    packed_bytes: int


def lay_out(tensors: Sequence[torch.Tensor]) -> PackLayout:
    """Decide what is packed, how, and where.

    Raises:
        ValueError: a tensor is on another device, or isn't strided.
    """
    _check(tensors)
    by_storage: dict[int, list[int]] = {}
    for index, (shape, _, _, _, storage, _) in enumerate(signature_of(tensors)):
        if 0 not in shape:
            by_storage.setdefault(storage, []).append(index)
    memories: list[Memory] = []
    planned: list[tuple[_Source, int]] = []  # what to pack, and its memory
    views = [View(-1, 0)] * len(tensors)
    for indices in by_storage.values():
        sources = {index: _source(index, tensors[index]) for index in indices}
        for group in _overlapping(sources):
            start = min(sources[index].start_bytes for index in group)
            end = max(sources[index].end_bytes for index in group)
            start -= start % MEMORY_ALIGNMENT_BYTES
            for index in group:
                views[index] = View(len(memories), sources[index].start_bytes - start)
            planned += [(source, len(memories)) for source in _merged([sources[index] for index in group])]
            memories.append(Memory(start, end - start))
    pieces: list[Piece] = []
    end = 0
    for source, memory in planned:
        end += _gap(source, end)
        piece = Piece(
            kind=source.kind,
            tensor=source.tensor,
            memory=memory,
            start_bytes=source.start_bytes,
            dtype=source.dtype,
            sizes=source.sizes,
            strides=source.strides,
            numel=source.numel,
            offset_bytes=end,
        )
        pieces.append(piece)
        end += piece.packed_bytes
    return PackLayout(memories, pieces, views, end)


def _gap(source: _Source, end: int) -> int:
    """Bytes to leave free behind ``end`` in the buffer: raw pieces keep their address modulo that of memories."""
    if source.kind == RAW:
        return (source.start_bytes - end) % MEMORY_ALIGNMENT_BYTES
    return -end % PIECE_ALIGNMENT_BYTES


def _check(tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        name = f"tensors[{index}]"
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{name} must be a plain strided tensor: pass its .to_dense(), resolve_conj() or resolve_neg()"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(f"{name} is on {tensor.device}, tensors[0] on {tensors[0].device}: pack it separately")


def _source(index: int, tensor: torch.Tensor) -> _Source:
    steps = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    dtype = tensor.dtype
    start = int(tensor.storage_offset()) * dtype.itemsize
    if dtype.itemsize > 8:  # a kernel has no wider integer: two halves
        steps, dtype = [(size, 2 * step) for size, step in steps] + [(2, 1)], torch.int64
    sizes, strides = collapsed([size for size, _ in steps], [step for _, step in steps])
    kind = BITS if dtype == torch.bool else GATHER
    return _Source(index, start, dtype, tuple(sizes), tuple(strides), kind)


def _overlapping(sources: dict[int, _Source]) -> list[list[int]]:
    """Indices of ``sources`` of one storage in groups whose runs of bytes overlap."""
    groups: list[list[int]] = []
    end = -1
    for index in sorted(sources, key=lambda index: sources[index].start_bytes):
        if sources[index].start_bytes < end:
            groups[-1].append(index)
        else:
            groups.append([index])
        end = max(end, sources[index].end_bytes)
    return groups


def _merged(group: list[_Source]) -> list[_Source]:
    """What to pack of a memory. ``group`` is every tensor's view of it."""
    by_elements: dict[object, _Source] = {}
    for source in group:
        # In whatever order they are visited: a tensor and its transpose are the same elements.
        elements = (source.start_bytes, source.dtype, frozenset(zip(source.strides, source.sizes, strict=True)))
        by_elements.setdefault(elements, source)
    distinct = list(by_elements.values())
    start, end = min(source.start_bytes for source in distinct), max(source.end_bytes for source in distinct)
    if len(distinct) > 1 and sum(source.numel * source.dtype.itemsize for source in distinct) >= end - start:
        return [_run(distinct[0].tensor, start, end, bits=all(source.kind == BITS for source in distinct))]
    return [
        _run(source.tensor, source.start_bytes, source.end_bytes, bits=source.kind == BITS)
        if source.covers or source.shares
        else source
        for source in distinct
    ]


def _run(tensor: int, start: int, end: int, *, bits: bool) -> _Source:
    """All bytes from start to end. As bools they lose what lies between the views, which nobody reads."""
    if bits:
        return _Source(tensor, start, torch.bool, (end - start,), (1,), BITS)
    start -= start % _RAW_ALIGNMENT_BYTES  # never before the storage, and then 16 bytes move at a time
    return _Source(tensor, start, torch.uint8, (end - start,), (1,), RAW)
