"""Partial sums of squares of a gradient, in an order that no plan, thread count or device changes.

A tensor of n elements is cut in tiles of 16 rows x 1024 lanes, counted from its own start. A tile is summed as follows:

    x = finished(value)                 fp32; of a sum of gradients in fp32, see ``rounding``
    acc[lane] = acc[lane] + x * x       over the 16 rows in turn, multiplied and added separately in fp32
    acc[i] = acc[i] + acc[i + width]    for width = 512, 256, ..., 1; partial = acc[0]

Elements past the end count as zero, and every tile has one fp32 partial. The partials of a parameter are the same
wherever its chunk lives, so the norm does not depend on the plan, and neither does clipping.

Bytes: every value is read once, and 4 bytes are written per 16,384 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import (
    FLOATS,
    PROGRAM_ELEMENTS,
    TILE,
    TILE_CONSTANTS,
    TILE_LANES,
    TILE_OPTIONS,
    TILE_ROWS,
    check_vector,
    tiles,
)
from protrain_kernels.host_kernels import host_sum_of_squares
from protrain_kernels.launch import launch
from protrain_kernels.rounding import FP32, TYPE_CODES, check_weight_dtype, finished_reference, rounded
from protrain_kernels.split_master import widen


def sum_of_squares_reference(values: torch.Tensor, *, weight_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The partials of ``sum_of_squares`` in plain torch, for any shape and device."""
    count = tiles(values.numel())
    whole = torch.zeros(count * TILE, dtype=torch.float32, device=values.device)
    whole[: values.numel()] = finished_reference(values.reshape(-1), weight_dtype)
    lanes = torch.zeros(count, TILE_LANES, dtype=torch.float32, device=values.device)
    for row in whole.view(count, TILE_ROWS, TILE_LANES).unbind(1):
        lanes = lanes + row * row
    width = TILE_LANES // 2
    while width:
        lanes = lanes[:, :width] + lanes[:, width:]
        width //= 2
    return lanes.view(count)


@triton.jit
def lane_tree(lanes: tl.tensor, GROUP: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """[GROUP] sums of [GROUP, LANES] by pairwise halving.

    Each step adds pairs, and an addition of two values has only one order, so no compiler can change the result.
    """
    width: tl.constexpr = LANES // 2
    if width == 0:
        return tl.sum(lanes, axis=1)
    else:
        return lane_tree(tl.sum(tl.reshape(lanes, (GROUP, 2, width)), axis=1), GROUP, width)


# No other code depends on the length being a multiple of something, so one kernel serves all lengths.
@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["partials"])
def sum_of_squares_kernel(
    values: tl.tensor,
    partials: tl.tensor,
    numel: tl.tensor,
    ROUNDED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """One program sums GROUP tiles."""
    first = tl.program_id(0).to(tl.int64) * (GROUP * ROWS * LANES)
    place = (tl.arange(0, GROUP) * (ROWS * LANES))[:, None] + tl.arange(0, LANES)[None, :]
    lanes = tl.zeros((GROUP, LANES), dtype=tl.float32)
    if first + GROUP * ROWS * LANES <= numel:  # loads without a mask are wide whatever the length
        for group in range(0, ROWS, UNROLL):
            for row in tl.static_range(UNROLL):
                stored = tl.load(values + first + (group + row) * LANES + place)
                value = rounded(widen(stored), ROUNDED)
                lanes = lanes + value * value
    else:
        for row in range(ROWS):
            offsets = first + row * LANES + place
            stored = tl.load(values + offsets, mask=offsets < numel, other=0)
            value = rounded(widen(stored), ROUNDED)
            lanes = lanes + value * value
    tile = tl.arange(0, GROUP)
    started = first + tile * (ROWS * LANES) < numel
    tl.store(partials + first // (ROWS * LANES) + tile, lane_tree(lanes, GROUP, LANES), mask=started)


def launch_sum_of_squares(
    values: torch.Tensor,
    partials: torch.Tensor,
    *,
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    """Launch the Triton kernel on checked tensors."""
    numel = values.numel()
    rounded_to = TYPE_CODES[weight_dtype] if values.dtype is torch.float32 else FP32
    launch(
        sum_of_squares_kernel,
        -(-numel // PROGRAM_ELEMENTS),
        (values, partials),
        numel,
        (),
        (rounded_to, *TILE_CONSTANTS),
        TILE_OPTIONS,
        device_index=values.get_device(),
    )


def sum_of_squares(
    values: torch.Tensor,  # [n] bfloat16, float16 or float32
    partials: torch.Tensor,  # [tiles(n)] float32, written
    *,
    weight_dtype: torch.dtype = torch.float32,
) -> None:
    """Write the fp32 sum of squares of each tile of 16,384 values.

    Args:
        values: [n] bfloat16, float16 or float32, contiguous, any n.
        partials: [tiles(n)] float32 on the same device. A tile with an infinity or a NaN has a partial that is infinite
            or NaN.
        weight_dtype: the type of the weights whose gradient this is. A float32 sum is rounded to it before it is
            squared, as the update does.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length.
    """
    check_vector("values", values, dtypes=FLOATS, device=values.device)
    check_vector("partials", partials, dtypes=(torch.float32,), device=values.device, numel=tiles(values.numel()))
    check_weight_dtype(weight_dtype)
    if values.numel() == 0:
        return
    if values.is_cuda:
        launch_sum_of_squares(values, partials, weight_dtype=weight_dtype)
    elif not host_sum_of_squares(values, partials, weight_dtype=weight_dtype):
        partials.copy_(sum_of_squares_reference(values, weight_dtype=weight_dtype))
