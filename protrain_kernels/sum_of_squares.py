"""Partial sums of squares of a gradient, in an order that no plan, thread count or device changes.

A tensor of n elements is cut in tiles of 16 rows x 1024 lanes, counted from its own start. A tile is summed as follows:

    x = finished(value)                 fp32; of a sum of gradients in fp32, see ``rounding``
    acc[lane] = acc[lane] + x * x       over the 16 rows in turn, multiplied and added separately in fp32
    acc[i] = acc[i] + acc[i + width]    for width = 512, 256, ..., 1; partial = acc[0]

``flatten`` and ``fold`` write the partials of what they store; here is the reference, and what their kernels share.
Elements past the end count as zero, and every tile has one fp32 partial. The partials of a parameter are the same
wherever its chunk lives, so the norm does not depend on the plan, and neither does clipping.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import TILE, TILE_LANES, TILE_ROWS, tiles
from protrain_kernels.rounding import finished_reference


def sum_of_squares_reference(values: torch.Tensor, *, weight_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The partials in plain torch, for any shape and device: float32, [tiles(numel)].

    A float32 sum of gradients is rounded to ``weight_dtype`` before it is squared, as the update does.
    """
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
