"""The gradient that the norm and the update see: how it is made of an fp32 sum, and how its squares are summed up.

    finished = rounded(sum * gradient_factor)       one multiplication in fp32, one rounding to the weight's type

It is rounded to nearest, with ties to even, as torch casts. An fp32 weight takes the product as it is. A gradient of 16
bits is finished already and is taken as it is. So the update of a 16-bit weight gets a gradient of 16 bits, whether
that came from one backward or is the sum of several, by one GPU or by many.

Nobody stores the finished gradient. AdamW and the sums of squares each make it of the sum when they read that, which
costs no memory and no bytes moved.

The squares are summed up in an order that no plan, thread count or device changes. A tensor of n elements is cut in
tiles of 16 rows x 1024 lanes, counted from its own start. A tile is summed as follows:

    x = finished(value)                 in fp32
    acc[lane] = acc[lane] + x * x       over the 16 rows in turn, multiplied and added separately in fp32
    acc[i] = acc[i] + acc[i + width]    for width = 512, 256, ..., 1; partial = acc[0]

``flatten`` and ``fold`` write the partials of what they store; here is the reference, and what their kernels share.
Elements past the end count as zero, and every tile has one fp32 partial. The partials of a parameter are the same
wherever its chunk lives, so the norm does not depend on the plan, and neither does clipping.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from protrain_kernels.checks import TILE, TILE_LANES, TILE_ROWS, tiles

BF16, FP16, FP32 = 0, 1, 2  # TYPE
TYPE_CODES = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
SumOfSquares = Callable[..., torch.Tensor]  # ``sum_of_squares_reference``, or another implementation of it


def finished_reference(
    gradient: torch.Tensor, weight_dtype: torch.dtype, *, gradient_factor: float = 1.0
) -> torch.Tensor:
    """The finished gradient of weights of ``weight_dtype`` in fp32, for any shape and device."""
    if gradient.dtype is not torch.float32:
        return gradient.to(torch.float32)
    return (gradient * gradient_factor).to(weight_dtype).to(torch.float32)


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
def rounded(value: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """fp32 values rounded to nearest, ties to even, to what TYPE can represent. They stay fp32."""
    if TYPE == 0:
        bits = value.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(value != value, 0x7FC00000, upper).to(tl.float32, bitcast=True)
    elif TYPE == 1:
        return value.to(tl.float16).to(tl.float32)
    else:
        return value


@triton.jit
def narrow(value: tl.tensor, like: tl.tensor) -> tl.tensor:
    """fp32 rounded to nearest, ties to even, as torch casts to the element type of the pointer ``like``."""
    if like.dtype.element_ty == tl.int16:
        return (rounded(value, 0).to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    else:
        return value.to(like.dtype.element_ty)


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
