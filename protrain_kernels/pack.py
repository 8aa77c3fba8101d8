"""A block's saved activations <-> one contiguous buffer, in one launch whatever their number.

    kind     what it holds                          bytes
    raw      a run that its views cover             as many
    gather   a view with gaps, row-major            elements * element size
    bits     bool                                   1 / 8 an element

Views of one storage are packed once and come back as views of one allocation, with their shapes, strides and addresses
modulo 256, so that whatever reads them picks the same algorithm. Everything comes back bit for bit.

Raw pieces lie in the buffer as they lay in their storage, so ``unpack(..., in_place=True)`` returns views of the buffer
for them, and launches a kernel for the other kinds alone.

Bytes moved: the tensors read, the buffer written, or the other way; each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from protrain_kernels.checks import LAUNCH_OPTIONS, check_vector
from protrain_kernels.launch import launch, put_addresses
from protrain_kernels.pack_kernels import pack_kernel, unpack_kernel
from protrain_kernels.pack_layout import GATHER, RAW, RAW_TILE, TILE, Piece, Signature, lay_out, signature_of
from protrain_kernels.pack_reference import pack_piece, unpack_piece
from protrain_kernels.strided import is_dense, row_of

PACK_OPTIONS = {**LAUNCH_OPTIONS, "num_warps": 8}
PACK_STEPS = RAW_TILE // (4 * TILE)
_WIDE = 1 << 31  # positions that 32 bits don't count
_BUFFER_ALIGNMENT_BYTES = 16
_ON_DEVICE, _ON_HOST = (2,), (2, 3)  # by where the buffer is: which of the kernels' tensors host memory holds
_MOST_PLANS = 1024
_plans: dict[Signature, PackPlan] = {}


class _Table(NamedTuple):
    """What tells a launch of the kernels about its pieces."""

    constants: tuple[int, ...]
    piece_of: torch.Tensor  # by program
    rows: torch.Tensor  # by piece


class PackPlan:
    """What is packed of tensors of given layouts, prepared once; ``pack`` and ``unpack`` are one launch each.

    Args:
        tensors: of the shapes, strides, types, device and sharing of storages of those that come later; their values
            aren't read.

    Raises:
        ValueError: a tensor is on another device, or isn't strided.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            raise ValueError("a plan needs at least one tensor: there is nothing to pack")
        self.device = tensors[0].device
        self._layout = lay_out(tensors)
        self._signature = signature_of(tensors)
        self.packed_bytes = self._layout.packed_bytes
        self.unpacked_bytes = sum(memory.size_bytes for memory in self._layout.memories)
        pieces, memories = self._layout.pieces, self._layout.memories
        # The tensor or memory of each piece, and the bytes from its data to the piece's start.
        self._sources = [
            (piece.tensor, piece.start_bytes - self._signature[piece.tensor][5] * tensors[piece.tensor].element_size())
            for piece in pieces
        ]
        self._targets = [(piece.memory, piece.start_bytes - memories[piece.memory].start_bytes) for piece in pieces]
        self._alone = self._alone_in_memories()
        # By memory: the position in the buffer of one that lies there as a single raw piece, which serves as it is.
        in_memory = [[piece for piece in pieces if piece.memory == index] for index in range(len(memories))]
        self._in_buffer = [
            of_it[0].offset_bytes + memory.start_bytes - of_it[0].start_bytes
            if len(of_it) == 1 and of_it[0].kind == RAW
            else None
            for memory, of_it in zip(memories, in_memory, strict=True)
        ]
        self._elsewhere = [index for index, piece in enumerate(pieces) if self._in_buffer[piece.memory] is None]
        self._whole = self._table(pieces)
        self._coded = self._table([pieces[index] for index in self._elsewhere])
        self._device_index = self._whole.rows.get_device()

    def _alone_in_memories(self) -> list[int]:
        """The tensor that is all there is on each memory, which can be allocated as that tensor; -1 where none is."""
        users: list[list[int]] = [[] for _ in self._layout.memories]
        for index, view in enumerate(self._layout.views):
            if view.memory >= 0:
                users[view.memory].append(index)
        found = []
        for memory, indices in zip(self._layout.memories, users, strict=True):
            shape, stride, dtype, _, _, _ = self._signature[indices[0]]
            extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            whole = len(indices) == 1 and extent * dtype.itemsize == memory.size_bytes
            found.append(indices[0] if whole else -1)
        return found

    def _table(self, pieces: Sequence[Piece]) -> _Table:
        """The table of one launch that packs or unpacks ``pieces``."""
        strided = [piece for piece in pieces if not is_dense(piece.sizes, piece.strides)]
        dims = 1 << (max(len(piece.sizes) for piece in strided) - 1).bit_length() if strided else 0
        kinds = widths = program = 0
        rows = []
        for piece in pieces:
            kinds |= 1 << piece.kind
            widths |= piece.dtype.itemsize if piece.kind == GATHER else 0
            head = (piece.kind, piece.numel, piece.offset_bytes, program, piece.dtype.itemsize)
            shape = row_of(piece.sizes, piece.strides, dims) if dims else []
            rows.append([*head, int(is_dense(piece.sizes, piece.strides)), *shape])
            program += piece.tiles
        counts = torch.tensor([piece.tiles for piece in pieces], dtype=torch.int64)
        piece_of = torch.repeat_interleave(torch.arange(len(pieces), dtype=torch.int32), counts)
        wide = any(piece.numel >= _WIDE for piece in strided)
        constants = (kinds, widths, dims, wide, TILE, PACK_STEPS)
        return _Table(constants, piece_of.to(self.device), torch.tensor(rows, dtype=torch.int64).to(self.device))

    def pack(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Write ``tensors`` into ``buffer``.

        Args:
            tensors: laid out as those that the plan was made for; unchanged.
            buffer: 1-d uint8 of packed_bytes or more at a multiple of 16 bytes, on the tensors' device, or in pinned
                host memory, which is then written over the link.

        Raises:
            ValueError: the tensors aren't laid out as the plan's, or the buffer can't hold them.
        """
        if signature_of(tensors) != self._signature:
            raise ValueError(
                "the tensors differ from those that the plan was made for in number, shape, stride, type, device or in "
                "how they share storages: make another plan"
            )
        self.pack_planned(tensors, buffer)

    def pack_planned(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """``pack`` for tensors that are known to be laid out as the plan's."""
        self._check_buffer(buffer)
        if self._device_index >= 0:
            self.launch_pack(tensors, buffer)
            return
        for piece in self._layout.pieces:
            pack_piece(piece, tensors[piece.tensor].untyped_storage(), piece.start_bytes, buffer)

    def unpack(self, buffer: torch.Tensor, *, in_place: bool = False) -> list[torch.Tensor]:
        """The tensors of a packed buffer, with their shapes, strides and sharing of memory.

        Args:
            buffer: what ``pack`` wrote.
            in_place: return what is raw as views of ``buffer``, which is on the device: that costs neither time nor
                memory. Addresses come back modulo 256 where the buffer's storage starts at a multiple of that.

        Raises:
            ValueError: the buffer is too small, or of another type or device.
        """
        self._check_buffer(buffer)
        memories = self.memories(buffer if in_place else None)
        if self._device_index >= 0:
            self.launch_unpack(buffer, memories, in_place=in_place)
        else:
            for index in self._elsewhere if in_place else range(len(self._targets)):
                memory, start = self._targets[index]
                unpack_piece(self._layout.pieces[index], memories[memory].untyped_storage(), start, buffer)
        return self.views(memories)

    def memories(self, buffer: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Memory to unpack into, not written yet: the tensor itself where no other shares it, else bytes.

        With a ``buffer`` those that it holds as they are lie there.
        """
        return [
            self._memory(index) if buffer is None or start is None else self._memory_in(buffer, index, start)
            for index, start in enumerate(self._in_buffer)
        ]

    def _memory(self, index: int) -> torch.Tensor:
        if (alone := self._alone[index]) < 0:
            return torch.empty(self._layout.memories[index].size_bytes, dtype=torch.uint8, device=self.device)
        shape, stride, dtype, device, _, _ = self._signature[alone]
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def _memory_in(self, buffer: torch.Tensor, index: int, start: int) -> torch.Tensor:
        if (alone := self._alone[index]) < 0:
            return buffer[start:]
        shape, stride, dtype, device, _, _ = self._signature[alone]
        start += int(buffer.storage_offset())
        tensor = torch.empty(0, dtype=dtype, device=device)
        return tensor.set_(buffer.untyped_storage(), start // dtype.itemsize, shape, stride)

    def views(self, memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors on ``memories``, which were unpacked into."""
        found = []
        for index, view in enumerate(self._layout.views):
            if view.memory >= 0 and self._alone[view.memory] == index:
                found.append(memories[view.memory])
                continue
            shape, stride, dtype, device, _, _ = self._signature[index]
            tensor = torch.empty(0, dtype=dtype, device=device)
            if view.memory < 0:
                found.append(tensor.as_strided(shape, stride))
            else:
                memory = memories[view.memory]  # bytes
                start = int(memory.storage_offset()) + view.offset_bytes
                found.append(tensor.set_(memory.untyped_storage(), start // dtype.itemsize, shape, stride))
        return found

    def _check_buffer(self, buffer: torch.Tensor) -> None:
        device = self.device
        if self._device_index >= 0 and not buffer.is_cuda and buffer.device.type == "cpu" and buffer.is_pinned():
            device = buffer.device
        check_vector("buffer", buffer, dtypes=(torch.uint8,), device=device)
        if buffer.numel() < self.packed_bytes:
            raise ValueError(f"buffer has {buffer.numel()} bytes and needs {self.packed_bytes}")
        if buffer.data_ptr() % _BUFFER_ALIGNMENT_BYTES:
            raise ValueError(f"buffer must start at a multiple of {_BUFFER_ALIGNMENT_BYTES} bytes")

    def launch_pack(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Launch the Triton kernel of ``pack`` on checked tensors."""
        addresses = [tensors[index].data_ptr() + shift for index, shift in self._sources]
        self._launch(pack_kernel, self._whole, addresses, buffer)

    def launch_unpack(self, buffer: torch.Tensor, memories: Sequence[torch.Tensor], *, in_place: bool = False) -> None:
        """Launch the Triton kernel of ``unpack`` into ``memories``, one for each of the layout's."""
        table, pieces = (self._coded, self._elsewhere) if in_place else (self._whole, range(len(self._targets)))
        starts = [*map(torch.Tensor.data_ptr, memories)]
        targets = [self._targets[index] for index in pieces]
        self._launch(unpack_kernel, table, [starts[memory] + shift for memory, shift in targets], buffer)

    def _launch(self, kernel: object, table: _Table, addresses: list[int], buffer: torch.Tensor) -> None:
        if not addresses:
            return
        memory, slot = put_addresses(self._device_index, addresses)
        launch(
            kernel,
            table.piece_of.numel(),
            (table.piece_of, table.rows, memory, buffer),
            slot,
            (),
            table.constants,
            PACK_OPTIONS,
            device_index=self._device_index,
            on_host=_ON_DEVICE if buffer.is_cuda else _ON_HOST,
        )


class Packed(NamedTuple):
    """Tensors in one buffer, and how to get them out of it."""

    plan: PackPlan
    buffer: torch.Tensor  # [packed bytes] uint8


def pack(
    tensors: Sequence[torch.Tensor],
    buffer: torch.Tensor | None = None,  # [packed bytes or more] uint8
) -> Packed:
    """Pack tensors of any layouts, views of one storage once, into one buffer.

    What depends on their layouts alone is prepared at the first call with them (``PackPlan``).

    Args:
        tensors: strided tensors on one device, of any type, stride and number; unchanged.
        buffer: where to, as ``PackPlan.pack`` wants it; made when None.

    Raises:
        ValueError: a tensor can't be packed, or the buffer can't hold them.
    """
    signature = signature_of(tensors)
    plan = _plans.get(signature)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:  # layouts that change on every call: don't hold their tables for ever
            _plans.clear()
        plan = _plans[signature] = PackPlan(tensors)
    if buffer is None:
        buffer = torch.empty(plan.packed_bytes, dtype=torch.uint8, device=plan.device)
    plan.pack_planned(tensors, buffer)
    return Packed(plan, buffer)


def unpack(packed: Packed) -> list[torch.Tensor]:
    """The tensors that ``pack`` packed, with their shapes, strides and sharing of memory."""
    return packed.plan.unpack(packed.buffer)
