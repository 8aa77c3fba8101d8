"""Addresses the elements of tensors with any strides, for a kernel that visits them in row-major order."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl


def collapsed(shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], list[int]]:
    """The fewest sizes and strides that visit the same elements in the same order: none for one element."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == step * size:
            sizes[-1] *= size
            strides[-1] = step
        else:
            sizes.append(size)
            strides.append(step)
    return sizes, strides


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether collapsed ``sizes`` and ``strides`` are one contiguous run."""
    return not sizes or list(strides) == [1]


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two positions may share an element. False only where dimensions nest, as in all but contrived views."""
    reach = 0
    for step, size in sorted(zip(strides, sizes, strict=True)):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def row_of(sizes: Sequence[int], strides: Sequence[int], dims: int) -> list[int]:
    """``dims`` sizes, then ``dims`` strides, for ``strided_offsets``. Missing leading dimensions have the size 1."""
    fill = dims - len(sizes)
    return [1] * fill + list(sizes) + [0] * fill + list(strides)


@triton.jit
def strided_offsets(row: tl.tensor, index: tl.tensor, DIMS: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Element offsets of the row-major positions ``index`` (int64) in a tensor whose sizes, then strides, are at row.

    Unless WIDE, all positions are below 2^31 and are divided as 32-bit integers, which is several times faster.
    """
    offsets = index * 0
    if WIDE:
        rest = index
        for back in range(DIMS):  # in a loop, as 64-bit divisions of all dimensions at once do not fit the registers
            size = tl.load(row + (DIMS - 1 - back))
            offsets += rest % size * tl.load(row + DIMS + (DIMS - 1 - back))
            rest = rest // size
    else:
        rest = index.to(tl.int32)
        if DIMS > 4:
            for back in range(DIMS - 1):  # in a loop, as more divisions at once do not fit the registers
                size = tl.load(row + (DIMS - 1 - back)).to(tl.int32)
                offsets += (rest % size).to(tl.int64) * tl.load(row + DIMS + (DIMS - 1 - back))
                rest = rest // size
        else:
            for axis in tl.static_range(DIMS - 1, 0, -1):
                size = tl.load(row + axis).to(tl.int32)
                offsets += (rest % size).to(tl.int64) * tl.load(row + DIMS + axis)
                rest = rest // size
        offsets += rest.to(tl.int64) * tl.load(row + DIMS)
    return offsets
