"""The gradients of W ranks -> their sum or mean, added in the order of the ranks, in one launch.

After an all_to_all a rank has W pieces of the gradients of its shard of a chunk, or of a contiguous range of it: row w
of ``pieces`` came from rank w. ``fold`` adds them up. The same pass scales, rounds, zeroes the padding and sums
squares.

    total = fp32(pieces[0]); total = total + fp32(pieces[1]); ...      one addition after another, in fp32
    total = accumulator + fp32(pieces[0]) + fp32(pieces[1]) + ...      with an accumulator, in this order
    accumulator = total
    gradient = total * factor                  multiplied in fp32, then rounded once to nearest, ties to even
    padding of gradient and accumulator = 0
    partials = sums of squares of what the gradient now holds, for the whole tiles of each slice (see rounding.py)

The order of additions does not depend on how ranks and micro-batches are shared out: W ranks with A micro-batches each
give the bits of one rank with W x A micro-batches. A reduction by the collective itself would add in an order of its
own, and most round to 16 bits at every hop.

A rank without a gradient sends -0.0 throughout. Adding -0.0 changes no value, not even the sign of a zero, so the
kernel treats it like any other piece. For the same reason an accumulator that is filled with -0.0 begins a new sum.

A range may cut a tile of a parameter. Nobody has all the values of such a tile, so its partial is not written here;
``Slice.whole_tiles`` says which are.

Bytes per element: W pieces are read and the gradient is written, which is 2 W + 2 for bf16. An accumulator adds 8.

A program takes two tiles of one slice's parameter (see [Note: row tables] in slices.py), counted from the parameter's
own start, so that a shard may cut a tile anywhere.

Slices begin at multiples of 128 elements of aligned memory, and the padding behind them may be read. So one path serves
whole and cut tiles: every access moves 16 bytes a thread, under a mask that changes only at multiples of 128 elements.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import (
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
from protrain_kernels.host_kernels import sum_of_squares
from protrain_kernels.launch import launch
from protrain_kernels.rounding import SumOfSquares, lane_tree, narrow, sum_of_squares_reference
from protrain_kernels.slices import RowTable, Slice
from protrain_kernels.split_master import widen

table_for = functools.lru_cache(maxsize=1 << 14)(RowTable)  # a limit, as slices might change on every call
MOST_RANKS = 16  # the kernel holds a row of every rank in registers
_MOST_ROWS = 2  # with 4, a loop of 4 turns is left, which NVIDIA's assembler unrolls at three times the registers
_LOADS_TOGETHER = 8  # loads of 16 bytes that a thread has in flight before it adds


def rows_together(ranks: int, dtype: torch.dtype, *, accumulate: bool) -> int:
    """How many rows of a tile are loaded before the first addition: fewer where a row takes more registers."""
    loads = ranks * dtype.itemsize // 2 + (2 if accumulate else 0)  # a thread has 8 elements of a row
    return min(_MOST_ROWS, max(1, _LOADS_TOGETHER // loads))


def fold_reference(
    pieces: torch.Tensor,
    slices: Sequence[Slice],
    *,
    gradient: torch.Tensor | None,
    accumulator: torch.Tensor | None = None,
    factor: float,
    partials: torch.Tensor | None = None,
    squares: SumOfSquares = sum_of_squares_reference,
) -> None:
    """``fold`` in plain torch, with sums of squares by ``squares``."""
    for part in slices:
        own = slice(part.offset, part.offset + part.numel)
        padding = slice(own.stop, part.offset + part.padded)
        first, *others = pieces[:, own]
        if accumulator is None:
            total = first.to(torch.float32, copy=True)
        else:
            total = accumulator[own].add_(first)
            accumulator[padding] = 0
        for other in others:
            total += other
        if gradient is None:
            continue
        gradient[own] = (total * factor).to(gradient.dtype)
        gradient[padding] = 0
        if partials is not None and part.whole_tiles:
            whole = part.whole_tiles
            values = gradient[own][whole.start * TILE - part.first : whole.stop * TILE - part.first]
            written = slice(part.partial_offset + whole.start, part.partial_offset + whole.stop)
            partials[written] = squares(values)


@triton.jit
def load_pieces(
    source: tl.tensor,
    offsets: tl.tensor,
    stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    LANES: tl.constexpr,
    RANKS: tl.constexpr,
    COUNT: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """COUNT loads: a row of ``offsets`` from every rank's piece, then the next row from every rank's, and so on.

    Elements before ``begin`` and from ``end`` on are 0. All loads are issued before the caller adds or stores any of
    them, for the reason that ``load_rows`` gives.
    """
    LAST: tl.constexpr = COUNT - 1
    row = offsets + (LAST // RANKS) * LANES
    loaded = tl.load(source + (LAST % RANKS) * stride + row, mask=(row >= begin) & (row < end), other=0)
    if COUNT == 1:
        return (loaded,)
    else:
        pieces = load_pieces(source, offsets, stride, begin, end, LANES, RANKS, COUNT - 1)
        pieces += (loaded,)
        return pieces


@triton.jit(do_not_specialize_on_alignment=["partials"])
def fold_kernel(
    slice_of: tl.tensor,
    rows: tl.tensor,
    pieces: tl.tensor,
    gradient: tl.tensor,
    accumulator: tl.tensor,
    partials: tl.tensor,
    stride: tl.tensor,
    factor: tl.tensor,
    RANKS: tl.constexpr,
    GRADIENT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SQUARES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program folds GROUP tiles of one slice's parameter. Row w of the pieces begins at w * stride."""
    program = tl.program_id(0)
    row = rows + tl.load(slice_of + program).to(tl.int64) * 6
    first = tl.load(row + 1)
    stop = tl.load(row + 2)
    # Tiles are counted from the start of the parameter, also where the slice begins later.
    tile = first // (ROWS * LANES) + (program - tl.load(row + 5)) * GROUP
    base = tile * (ROWS * LANES)
    # What the slice has of these tiles, counted from the first of them: elements begin to end, with padding to room.
    begin = tl.multiple_of(tl.maximum(first - base, 0).to(tl.int32), 128)
    end = tl.minimum(stop - base, GROUP * ROWS * LANES).to(tl.int32)
    room = (end + 127) // 128 * 128
    place = tl.multiple_of(tl.load(row), 128) + base  # in the range
    source, target, sums = pieces + place, gradient + place, accumulator + place
    stride = stride.to(tl.int64)  # a rank times 32 bits could overflow
    tiles = (tl.arange(0, GROUP) * (ROWS * LANES))[:, None] + tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((GROUP, LANES), dtype=tl.float32)
    for group in range(0, ROWS, UNROLL):
        offsets = group * LANES + tiles
        loaded = load_pieces(source, offsets, stride, begin, room, LANES, RANKS, RANKS * UNROLL)
        befores = load_pieces(sums, offsets, stride, begin, room, LANES, 1, UNROLL) if ACCUMULATE else loaded
        for step in tl.static_range(UNROLL):
            at = offsets + step * LANES
            mask = (at >= begin) & (at < room)
            total = widen(loaded[step * RANKS])
            if ACCUMULATE:
                total = befores[step] + total
            for rank in tl.static_range(1, RANKS):
                total = total + widen(loaded[step * RANKS + rank])
            if ACCUMULATE:
                tl.store(sums + at, tl.where(at < end, total, 0.0), mask=mask)  # the padding is zero
            if GRADIENT:
                result = narrow(tl.where(at < end, total * factor, 0.0), target)
                tl.store(target + at, result, mask=mask)
                held = widen(result)
                lanes = lanes + held * held
    if SQUARES:
        ours = tl.arange(0, GROUP)
        starts = base + ours * (ROWS * LANES)
        # A tile that the slice cuts has no partial. The parameter's last tile may be short.
        stops = tl.minimum(starts + ROWS * LANES, tl.load(row + 3))
        whole = (first <= starts) & (starts < stop) & (stops <= stop)
        tl.store(partials + tl.load(row + 4) + tile + ours, lane_tree(lanes, GROUP, LANES), mask=whole)


def launch_fold(
    table: RowTable,
    pieces: torch.Tensor,
    *,
    gradient: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    factor: float,
    partials: torch.Tensor | None,
) -> None:
    """Launch the Triton kernel on checked tensors."""
    ranks, accumulate = len(pieces), accumulator is not None
    # The pieces stand for a tensor that is not there.
    written = [pieces if tensor is None else tensor for tensor in (gradient, accumulator, partials)]
    launch(
        fold_kernel,
        table.programs,
        (table.slice_of, table.rows, pieces, *written),
        pieces.stride(0),
        (factor,),
        (
            *(ranks, gradient is not None, accumulate, partials is not None),
            *(TILE_GROUP, TILE_ROWS, TILE_LANES, rows_together(ranks, pieces.dtype, accumulate=accumulate)),
        ),
        TILE_OPTIONS,
        device_index=table.device_index,
    )


def _check_pieces(pieces: torch.Tensor) -> int:
    """The number of elements of each piece. ValueError unless the pieces have the right type and layout."""
    if pieces.dtype not in FLOATS:
        raise ValueError(f"pieces must be {' or '.join(map(str, FLOATS))}, not {pieces.dtype}: cast them first")
    if pieces.dim() != 2 or (pieces.numel() and pieces.stride(1) != 1):
        raise ValueError("pieces must be [ranks, elements], each contiguous: pass pieces.contiguous()")
    check_memory("pieces", device=pieces.device, negates=pieces.is_neg())
    ranks, elements = pieces.shape
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"pieces of {ranks} ranks: fold 1 to {MOST_RANKS} at a time, the first into a float32 gradient that is "
            "the accumulator of the next"
        )
    if elements % PADDING or pieces.stride(0) % PADDING:
        raise ValueError(f"pieces have {elements} elements each: pad them to a multiple of {PADDING}")
    check_aligned("pieces", pieces)
    return elements


def fold(
    pieces: torch.Tensor,  # [ranks, n] bfloat16, float16 or float32
    slices: Sequence[Slice],
    *,
    gradient: torch.Tensor | None,  # [n] bfloat16, float16 or float32, written
    accumulator: torch.Tensor | None = None,  # [n] float32, read and written
    factor: float,
    partials: torch.Tensor | None = None,  # [partials] float32, written
) -> None:
    """Add the pieces of all ranks in rank order, with partial sums of squares, reading each once.

    The first call with given slices prepares what depends on them alone (``RowTable``). Of several micro-batches, the
    first may write its sum into a float32 ``gradient`` with a factor of 1.0, which later ones pass as ``accumulator``.

    Args:
        pieces: row w came from rank w. At most 16 rows; n is a multiple of 128. Rows may be parts of longer ones.
        slices: the parameters' parts in the range of n elements. Nothing outside them and their padding is touched.
        gradient: what the total times the factor is written to, rounded to its type; None to accumulate alone.
        accumulator: what the total begins with, and where it is kept for a later micro-batch.
        factor: 1 / ranks for the mean and 1.0 for the sum, rounded to fp32. The multiplication is always done.
        partials: 1-d; each slice writes those of its whole tiles, of the values that the gradient then holds. An
            infinity or a NaN makes its partial infinite or NaN.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or slices overlap or reach beyond the range.
    """
    if gradient is None and accumulator is None:
        raise ValueError("fold has nowhere to write: pass a gradient, an accumulator or both")
    if gradient is None and partials is not None:
        raise ValueError("partials are of the gradient: pass it too")
    if gradient is not None and accumulator is not None and gradient.data_ptr() == accumulator.data_ptr() != 0:
        raise ValueError("gradient and accumulator are the same memory: pass two tensors, or the gradient alone")
    table = table_for(tuple(slices), pieces.device)
    elements = _check_pieces(pieces)
    table.check_room(elements, partials)
    for name, tensor, dtypes in (("gradient", gradient, FLOATS), ("accumulator", accumulator, (torch.float32,))):
        if tensor is not None:
            check_vector(name, tensor, dtypes=dtypes, device=table.device, numel=elements)
            check_aligned(name, tensor)
    factor = ctypes.c_float(factor).value  # rounded here, so that every implementation multiplies by the same
    how: dict[str, Any] = {"gradient": gradient, "accumulator": accumulator, "factor": factor, "partials": partials}
    if pieces.is_cuda:
        launch_fold(table, pieces, **how)
    else:
        fold_reference(pieces, slices, **how, squares=sum_of_squares)
