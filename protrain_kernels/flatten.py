"""Gradients -> one chunk of gradients: copy or accumulate, zero padding and partial sums of squares in the same pass.

    chunk[offset : offset + n] = grad                    in the gradient's type or fp32
    chunk[offset : offset + n] += fp32(grad)             with accumulate (an fp32 chunk)
    chunk[offset + n : next multiple of 128] = 0
    partials[start : start + tiles(n)] = sums of squares of what the chunk now holds (see sum_of_squares)

A partial is finite only where its part of the gradient is, so the squares are the finite check as well.

Bytes per element: the gradient read, the chunk written (and read with accumulate): 4 for bf16 into bf16, 10 for bf16
accumulated in fp32. A pass of its own for the squares would read the chunk again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from protrain_kernels import host_adam
from protrain_kernels.checks import (
    FLOATS,
    PADDING,
    TILE_LANES,
    TILE_OPTIONS,
    TILE_ROWS,
    check_aligned,
    check_vector,
    current_device,
    padded,
    tiles,
)
from protrain_kernels.split_master import as_bits, widen
from protrain_kernels.sum_of_squares import UNROLL, lane_tree, sum_of_squares_reference


def flatten_reference(
    gradients: Sequence[torch.Tensor],
    chunk: torch.Tensor,
    offsets: Sequence[int],
    partials: torch.Tensor,
    partial_offsets: Sequence[int],
    *,
    accumulate: bool = False,
) -> None:
    """``flatten`` in plain torch."""
    for gradient, offset, start in zip(gradients, offsets, partial_offsets, strict=True):
        numel = gradient.numel()
        target = chunk[offset : offset + numel]
        values = gradient.reshape(-1).to(chunk.dtype)
        target.copy_(target + values if accumulate else values)
        chunk[offset + numel : offset + padded(numel)].zero_()
        partials[start : start + tiles(numel)] = sum_of_squares_reference(target)


@triton.jit
def flatten_kernel(
    gradient: tl.tensor,
    chunk: tl.tensor,
    partials: tl.tensor,
    numel: tl.tensor,
    numel_padded: tl.tensor,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program moves one tile of one gradient; ``chunk`` and ``partials`` point to that gradient's place."""
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * (ROWS * LANES)
    lane = tl.arange(0, LANES)
    lanes = tl.zeros((LANES,), dtype=tl.float32)
    if first + ROWS * LANES <= numel:  # without a mask the accesses are wide whatever the length
        for group in range(0, ROWS, UNROLL):
            for row in tl.static_range(UNROLL):
                offsets = first + (group + row) * LANES + lane
                stored = tl.load(gradient + offsets)
                value = widen(stored)
                if ACCUMULATE:
                    value = tl.load(chunk + offsets) + value
                if chunk.dtype.element_ty == tl.float32:
                    tl.store(chunk + offsets, value)
                else:
                    tl.store(chunk + offsets, stored)
                lanes = lanes + value * value
    else:
        for row in range(ROWS):
            offsets = first + row * LANES + lane
            mask = offsets < numel
            stored = tl.load(gradient + offsets, mask=mask, other=0)
            value = widen(stored)
            if ACCUMULATE:
                value = tl.load(chunk + offsets, mask=mask, other=0.0) + value
            # The padding takes the zeros of the masked loads.
            if chunk.dtype.element_ty == tl.float32:
                tl.store(chunk + offsets, value, mask=offsets < numel_padded)
            else:
                tl.store(chunk + offsets, stored, mask=offsets < numel_padded)
            lanes = lanes + value * value
    tl.store(partials + tile, lane_tree(lanes, LANES))


def launch_flatten(gradient: torch.Tensor, target: torch.Tensor, partials: torch.Tensor, *, accumulate: bool) -> None:
    """Launch the Triton kernel for one checked gradient; ``target`` and ``partials`` start at its place."""
    numel = gradient.numel()
    with current_device(gradient):
        flatten_kernel[(tiles(numel),)](
            as_bits(gradient),
            as_bits(target),
            partials,
            numel,
            padded(numel),
            ACCUMULATE=accumulate,
            ROWS=TILE_ROWS,
            LANES=TILE_LANES,
            UNROLL=UNROLL,
            **TILE_OPTIONS,
        )


def _check(
    gradients: Sequence[torch.Tensor],
    chunk: torch.Tensor,
    offsets: Sequence[int],
    partials: torch.Tensor,
    partial_offsets: Sequence[int],
    accumulate: bool,
) -> None:
    device = chunk.device
    check_vector("chunk", chunk, dtypes=FLOATS, device=device)
    check_aligned("chunk", chunk)
    check_vector("partials", partials, dtypes=(torch.float32,), device=device)
    if accumulate and chunk.dtype != torch.float32:
        raise ValueError(f"gradients accumulate in a float32 chunk, not {chunk.dtype}: make the chunk float32")
    if not len(gradients) == len(offsets) == len(partial_offsets):
        raise ValueError(
            f"{len(gradients)} gradients need as many offsets and partial_offsets, "
            f"not {len(offsets)} and {len(partial_offsets)}"
        )
    for index, (gradient, offset, start) in enumerate(zip(gradients, offsets, partial_offsets, strict=True)):
        name, numel = f"gradients[{index}]", gradient.numel()
        if gradient.device != device:
            raise ValueError(f"{name} is on {gradient.device}, the chunk on {device}: move it there")
        if gradient.dtype not in FLOATS or chunk.dtype not in (gradient.dtype, torch.float32):
            raise ValueError(f"{name} is {gradient.dtype}, which a {chunk.dtype} chunk can't hold: cast it first")
        if not gradient.is_contiguous():
            raise ValueError(f"{name} must be contiguous: pass its .contiguous()")
        if offset % PADDING or not 0 <= offset <= chunk.numel() - padded(numel):
            raise ValueError(
                f"offsets[{index}] is {offset}: it must be a multiple of {PADDING} that leaves room for "
                f"{padded(numel)} of the chunk's {chunk.numel()} elements"
            )
        if not 0 <= start <= partials.numel() - tiles(numel):
            raise ValueError(
                f"partial_offsets[{index}] is {start}: it must leave room for "
                f"{tiles(numel)} of {partials.numel()} partials"
            )


def flatten(
    gradients: Sequence[torch.Tensor],  # any shapes, contiguous
    chunk: torch.Tensor,  # [chunk elements] the gradients' type or float32, written
    offsets: Sequence[int],  # elements into chunk
    partials: torch.Tensor,  # [partials] float32, written
    partial_offsets: Sequence[int],  # elements into partials
    *,
    accumulate: bool = False,
    threads: int = 0,
) -> None:
    """Write gradients into their places of a chunk, with their partial sums of squares, reading each once.

    Args:
        gradients: contiguous tensors of any shape and alignment, bfloat16, float16 or float32.
        chunk: 1-d, of the gradients' type or float32. Each gradient's padding up to a multiple of 128 elements is
            zeroed; nothing else outside the gradients is touched.
        offsets: where each gradient starts in the chunk: multiples of 128 elements.
        partials: 1-d float32; gradient i writes tiles(numel) of them, of the values that the chunk holds afterwards.
        partial_offsets: where each gradient's partials start.
        accumulate: add to a float32 chunk rather than overwrite.
        threads: host threads for CPU tensors; 0 is torch.get_num_threads().

    Raises:
        ValueError: a tensor has the wrong type, device or layout, or doesn't fit at its offset.
    """
    _check(gradients, chunk, offsets, partials, partial_offsets, accumulate)
    for gradient, offset, start in zip(gradients, offsets, partial_offsets, strict=True):
        numel = gradient.numel()
        if numel == 0:
            continue
        target = chunk[offset : offset + padded(numel)]
        own = partials[start : start + tiles(numel)]
        if chunk.is_cuda:
            launch_flatten(gradient, target, own, accumulate=accumulate)
        elif not host_adam.host_flatten(gradient, target, own, accumulate=accumulate, threads=threads):
            flatten_reference([gradient], target, [0], own, [0], accumulate=accumulate)
