"""The kernel of ``fold`` and its reference; ``fold`` says what they compute.

One launch serves any number of slices. A program takes two tiles of one slice's parameter, counted from the parameter's
own start, so that a shard may cut a tile anywhere. A table says which slice that is, and a row of int64 describes the
slice:

    row = [offset - first, first, stop, elements of the parameter, offset of its partials, first program]

Programs whose tiles lie wholly in the slice move 16 bytes a thread and access. The others work under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import TILE
from protrain_kernels.flatten_kernels import narrow
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
    mask: tl.tensor,
    MASKED: tl.constexpr,
    LANES: tl.constexpr,
    RANKS: tl.constexpr,
    COUNT: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """COUNT loads: a row of ``offsets`` from every rank's piece, then the next row from every rank's, and so on.

    All are issued before the caller adds or stores any of them, for the reason that ``load_rows`` gives.
    """
    LAST: tl.constexpr = COUNT - 1
    place = source + (LAST % RANKS) * stride + offsets + (LAST // RANKS) * LANES
    loaded = tl.load(place, mask=mask, other=0) if MASKED else tl.load(place)
    if COUNT == 1:
        return (loaded,)
    else:
        pieces = load_pieces(source, offsets, stride, mask, MASKED, LANES, RANKS, COUNT - 1)
        pieces += (loaded,)
        return pieces


@triton.jit
def fold_row(
    total: tl.tensor,
    factor: tl.tensor,
    gradient: tl.tensor,
    accumulator: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    room: tl.tensor,
    GRADIENT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Stores one row of each tile and returns what the gradient then holds, in fp32."""
    if ACCUMULATE:
        if MASKED:
            tl.store(accumulator + offsets, tl.where(mask, total, 0.0), mask=room)  # the padding is zero
        else:
            tl.store(accumulator + offsets, total)
    if GRADIENT:
        value = total * factor
        if MASKED:
            result = narrow(tl.where(mask, value, 0.0), gradient)
            tl.store(gradient + offsets, result, mask=room)
        else:
            result = narrow(value, gradient)
            tl.store(gradient + offsets, result)
        return widen(result)
    else:
        return total


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
    shift = tl.multiple_of(tl.load(row), 128)
    first = tl.load(row + 1)
    stop = tl.load(row + 2)
    # Elements of the parameter are counted from its start, also where the slice begins later.
    base = (first // (ROWS * LANES) + (program - tl.load(row + 5)) * GROUP) * (ROWS * LANES)
    place = (tl.arange(0, GROUP) * (ROWS * LANES))[:, None] + tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((GROUP, LANES), dtype=tl.float32)
    step_of_ranks = tl.cast(stride, tl.int64)  # a rank times 32 bits could overflow
    source = pieces + shift + base
    target = gradient + shift + base
    sums = accumulator + shift + base
    if (first <= base) & (base + GROUP * ROWS * LANES <= stop):
        for group in range(0, ROWS, UNROLL):
            offsets = group * LANES + place
            mask = place < 0  # unused
            loaded = load_pieces(source, offsets, step_of_ranks, mask, False, LANES, RANKS, RANKS * UNROLL)
            befores = load_pieces(sums, offsets, step_of_ranks, mask, False, LANES, 1, UNROLL) if ACCUMULATE else loaded
            for step in tl.static_range(UNROLL):
                total = widen(loaded[step * RANKS])
                if ACCUMULATE:
                    total = befores[step] + total
                for rank in tl.static_range(1, RANKS):
                    total = total + widen(loaded[step * RANKS + rank])
                held = fold_row(
                    total,
                    factor,
                    target,
                    sums,
                    offsets + step * LANES,
                    mask,
                    mask,
                    GRADIENT,
                    ACCUMULATE,
                    MASKED=False,
                )
                lanes = lanes + held * held
    else:
        padded = first + (stop - first + 127) // 128 * 128
        for step in range(ROWS):
            offsets = step * LANES + place
            element = base + offsets
            mask = (element >= first) & (element < stop)
            loaded = load_pieces(source, offsets, step_of_ranks, mask, True, LANES, RANKS, RANKS)
            total = widen(loaded[0])
            if ACCUMULATE:
                total = tl.load(sums + offsets, mask=mask, other=0.0) + total
            for rank in tl.static_range(1, RANKS):
                total = total + widen(loaded[rank])
            held = fold_row(
                total,
                factor,
                target,
                sums,
                offsets,
                mask,
                (element >= first) & (element < padded),
                GRADIENT,
                ACCUMULATE,
                MASKED=True,
            )
            lanes = lanes + held * held
    if SQUARES:
        numel = tl.load(row + 3)
        tile = tl.arange(0, GROUP)
        begin = base + tile * (ROWS * LANES)
        whole = (first <= begin) & (begin < stop) & (tl.minimum(begin + ROWS * LANES, numel) <= stop)
        sums_of_tiles = lane_tree(lanes, GROUP, LANES)
        tl.store(partials + tl.load(row + 4) + base // (ROWS * LANES) + tile, sums_of_tiles, mask=whole)
