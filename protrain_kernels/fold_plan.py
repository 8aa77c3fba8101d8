"""What ``fold`` prepares once for given slices, and how it launches; see [Note: plans] in flatten_plan.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protrain_kernels.checks import (
    ALIGNMENT_BYTES,
    FLOATS,
    PADDING,
    TILE,
    TILE_GROUP,
    TILE_LANES,
    TILE_OPTIONS,
    TILE_ROWS,
    check_aligned,
    check_memory,
    check_vector,
)
from protrain_kernels.fold_kernels import fold_kernel
from protrain_kernels.launch import launch
from protrain_kernels.slices import Slice

MOST_RANKS = 16  # the kernel holds a row of every rank in registers
_MOST_ROWS = 2  # with 4, a loop of 4 turns is left, which NVIDIA's assembler unrolls at three times the registers
_LOADS_TOGETHER = 8  # loads of 16 bytes that a thread has in flight before it adds


def rows_together(ranks: int, dtype: torch.dtype, *, accumulate: bool) -> int:
    """How many rows of a tile are loaded before the first addition: fewer where a row takes more registers."""
    loads = ranks * dtype.itemsize // 2 + (2 if accumulate else 0)  # a thread has 8 elements of a row
    return min(_MOST_ROWS, max(1, _LOADS_TOGETHER // loads))


class FoldPlan:
    """Slices of parameters in a range, prepared for ``fold`` in one launch.

    Args:
        slices: without overlap in the range.
        device: where the pieces are.

    Raises:
        ValueError: slices overlap.
    """

    def __init__(self, slices: Sequence[Slice], device: torch.device) -> None:
        self.slices = list(slices)
        self.device = device
        self._check_overlaps()
        self._elements = max((part.offset + part.padded for part in slices), default=0)
        self._partials = max(
            (part.partial_offset + part.whole_tiles.stop for part in slices if part.whole_tiles), default=0
        )
        self._slice_of, self._rows = self._tables()
        self._programs = self._slice_of.numel()
        self._device_index = self._slice_of.get_device()

    def _check_overlaps(self) -> None:
        end = 0
        for index, part in sorted(enumerate(self.slices), key=lambda item: (item[1].offset, item[1].numel)):
            if part.numel and part.offset < end:
                raise ValueError(
                    f"slices[{index}] begins at {part.offset}, where another slice reaches to {end}: leave each room "
                    f"for its elements padded to a multiple of {PADDING}"
                )
            end = max(end, part.offset + part.padded)

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slice of each program, and the row of each slice."""
        program, programs, rows = 0, [], []
        for part in self.slices:
            rows.append(
                [part.offset - part.first, part.first, part.stop, part.parameter_numel, part.partial_offset, program]
            )
            touched = -(-part.stop // TILE) - part.first // TILE if part.numel else 0
            programs.append(-(-touched // TILE_GROUP))
            program += programs[-1]
        slice_of = torch.repeat_interleave(
            torch.arange(len(rows), dtype=torch.int32), torch.tensor(programs, dtype=torch.int64)
        )
        return slice_of.to(self.device), torch.tensor(rows, dtype=torch.int64).to(self.device)

    def check(
        self,
        pieces: torch.Tensor,
        gradient: torch.Tensor | None,
        accumulator: torch.Tensor | None,
        partials: torch.Tensor | None,
    ) -> None:
        """ValueError unless the tensors have the right type, device and layout, and enough room."""
        elements = _check_pieces(pieces)
        for index, part in enumerate(self.slices if self._elements > elements else ()):
            if part.offset + part.padded > elements:
                raise ValueError(
                    f"slices[{index}] takes elements {part.offset} to {part.offset + part.padded} of a range of "
                    f"{elements}: cut it at the end of the range"
                )
        for name, tensor, dtypes in (("gradient", gradient, FLOATS), ("accumulator", accumulator, (torch.float32,))):
            if tensor is not None:
                check_vector(name, tensor, dtypes=dtypes, device=self.device, numel=elements)
                check_aligned(name, tensor)
        if partials is None:
            return
        check_vector("partials", partials, dtypes=(torch.float32,), device=self.device)
        for index, part in enumerate(self.slices if self._partials > partials.numel() else ()):
            if part.whole_tiles and part.partial_offset + part.whole_tiles.stop > partials.numel():
                raise ValueError(
                    f"slices[{index}] writes partials up to {part.partial_offset + part.whole_tiles.stop} of "
                    f"{partials.numel()}: make partials longer"
                )

    def launch(
        self,
        pieces: torch.Tensor,
        *,
        gradient: torch.Tensor | None,
        accumulator: torch.Tensor | None,
        factor: float,
        partials: torch.Tensor | None,
    ) -> None:
        """Launch the Triton kernel on checked tensors."""
        if not self._programs:
            return
        ranks = len(pieces)
        accumulate = accumulator is not None
        launch(
            fold_kernel,
            self._programs,
            # The pieces stand for a tensor that is not there.
            (
                self._slice_of,
                self._rows,
                pieces,
                pieces if gradient is None else gradient,
                pieces if accumulator is None else accumulator,
                pieces if partials is None else partials,
            ),
            pieces.stride(0),
            (factor,),
            (
                *(ranks, gradient is not None, accumulate, partials is not None),
                *(TILE_GROUP, TILE_ROWS, TILE_LANES, rows_together(ranks, pieces.dtype, accumulate=accumulate)),
            ),
            TILE_OPTIONS,
            device_index=self._device_index,
        )


def _check_pieces(pieces: torch.Tensor) -> int:
    """The number of elements of each piece. ValueError unless the pieces have the right type and layout."""
    if pieces.dtype not in FLOATS:
        raise ValueError(f"pieces must be {' or '.join(map(str, FLOATS))}, not {pieces.dtype}: cast them first")
    if pieces.dim() != 2 or (pieces.numel() and pieces.stride(1) != 1):
        raise ValueError("pieces must be [ranks, elements], each contiguous: pass pieces.contiguous()")
    check_memory("pieces", pieces)
    ranks, elements = pieces.shape
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"pieces of {ranks} ranks: fold 1 to {MOST_RANKS} at a time, the first into a float32 gradient that is "
            "the accumulator of the next"
        )
    if elements % PADDING or pieces.stride(0) % PADDING:
        raise ValueError(f"pieces have {elements} elements each: pad them to a multiple of {PADDING}")
    if pieces.storage_offset() * pieces.element_size() % ALIGNMENT_BYTES:
        raise ValueError(f"pieces must start at a multiple of {ALIGNMENT_BYTES} bytes in their storage")
    return elements
