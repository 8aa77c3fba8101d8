"""The kernel of ``fold`` and its reference; ``fold`` says what they compute.

A program takes two tiles of one slice's parameter (see [Note: row tables] in slices.py), counted from the parameter's
own start, so that a shard may cut a tile anywhere.

Slices begin at multiples of 128 elements of aligned memory, and the padding behind them may be read. So one path serves
whole and cut tiles: every access moves 16 bytes a thread, under a mask that changes only at multiples of 128 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import TILE
from protrain_kernels.rounding import narrow
from protrain_kernels.slices import Slice
from protrain_kernels.split_master import widen
from protrain_kernels.sum_of_squares import lane_tree, sum_of_squares_reference


def fold_reference(
    pieces: torch.Tensor,
    slices: Sequence[Slice],
    *,
    gradient: torch.Tensor | None,
    accumulator: torch.Tensor | None = None,
    factor: float,
    partials: torch.Tensor | None = None,
) -> None:
    """``fold`` in plain torch."""
    for part in slices:
        own = slice(part.offset, part.offset + part.numel)
        padding = slice(own.stop, part.offset + part.padded)
        rows = [piece[own].float() for piece in pieces]
        if accumulator is not None:
            rows.insert(0, accumulator[own])
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        if accumulator is not None:
            accumulator[own] = total
            accumulator[padding] = 0
        if gradient is None:
            continue
        gradient[own] = (total * factor).to(gradient.dtype)
        gradient[padding] = 0
        if partials is not None and part.whole_tiles:
            whole = part.whole_tiles
            values = gradient[own][whole.start * TILE - part.first : whole.stop * TILE - part.first]
            written = slice(part.partial_offset + whole.start, part.partial_offset + whole.stop)
            partials[written] = sum_of_squares_reference(values)


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
