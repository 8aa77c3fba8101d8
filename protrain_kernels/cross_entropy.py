"""The cross-entropy of rows of logits, which are overwritten by its gradient.

For a row of logits r [words] with the target t:

    x = r, or softcap * tanh(r / softcap)
    lse = log(sum(exp(x)))
    loss = lse - x[t]
    r[i] = (exp(x[i] - lse) - (i == t)) * dx/dr[i] / divisor

All of it is computed in fp32, and a logit is rounded once when it is overwritten. A row whose target is to be ignored
has no loss and a gradient of zero. A row whose target is no word has NaN for both.

Bytes: a row is read twice and written once. The second reading finds it in the cache of the GPU where all rows in work
fit there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from protrain_kernels.launch import launch
from protrain_kernels.rounding import narrow
from protrain_kernels.split_master import widen

# Triton warns where it has to choose whether to fuse multiplications with additions.
OPTIONS: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": True}
LANES = 1024  # each has a sum of its own over eight neighbours at a time, which are 16 bytes of a 16-bit type
_REFERENCE_ROWS = 64
_LEAST = tl.constexpr(-3.0e38)  # below every logit, and finite, as the difference of two infinities is none


@triton.jit
def capped(logits: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """``SOFTCAP * tanh(logits / SOFTCAP)``, or ``logits`` if there is no cap."""
    if SOFTCAP == 0.0:
        return logits
    else:
        return SOFTCAP * (2.0 * tl.sigmoid(logits * (2.0 / SOFTCAP)) - 1.0)


@triton.jit
def cross_entropy_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    losses: tl.tensor,
    divisor: tl.tensor,
    ignore_index: tl.tensor,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WRITES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """One program takes one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
    target = tl.load(targets + row)
    counts = target != ignore_index
    place = (tl.arange(0, LANES) * 8)[:, None] + tl.arange(0, 8)[None, :]
    if counts:
        is_word = (target >= 0) & (target < WORDS)
        # It is read before the loop, whose sums all threads wait for, and so before any thread overwrites it.
        own = capped(widen(tl.load(logits + target, mask=is_word, other=0)), SOFTCAP)
        most = tl.full((LANES,), _LEAST, tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        for start in range(0, WORDS, LANES * 8):
            inside = start + place < WORDS
            value = capped(widen(tl.load(logits + start + place, mask=inside, other=0)), SOFTCAP)
            value = tl.where(inside, value, float("-inf"))
            higher = tl.maximum(most, tl.max(value, axis=1))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(value - higher[:, None]), axis=1)
            most = higher
        highest = tl.max(most, axis=0)
        lse = highest + tl.log(tl.sum(total * tl.exp(most - highest), axis=0))
        tl.store(losses + row, tl.where(is_word, lse - own, float("nan")))
        if WRITES:
            scale = tl.where(is_word, 1.0 / tl.load(divisor), float("nan"))
            for start in range(0, WORDS, LANES * 8):
                column = start + place
                value = capped(widen(tl.load(logits + column, mask=column < WORDS, other=0)), SOFTCAP)
                slope = tl.exp(value - lse)
                slope = tl.where(column == target, slope - 1.0, slope)
                if SOFTCAP != 0.0:
                    slope *= 1.0 - (value / SOFTCAP) * (value / SOFTCAP)
                tl.store(logits + column, narrow(slope * scale, logits), mask=column < WORDS)
    else:
        tl.store(losses + row, 0.0)
        if WRITES:
            zero = narrow(tl.zeros((LANES, 8), tl.float32), logits)
            for start in range(0, WORDS, LANES * 8):
                tl.store(logits + start + place, zero, mask=start + place < WORDS)


def launch_cross_entropy(
    logits: torch.Tensor,  # [rows, words] bfloat16, float16 or float32, with rows one behind another
    targets: torch.Tensor,  # [rows] int64
    losses: torch.Tensor,  # [rows] float32, written
    divisor: torch.Tensor,  # [] float32, by which the gradient is divided and the losses are not
    *,
    ignore_index: int,
    softcap: float,
    writes: bool,  # whether logits are overwritten
) -> None:
    """Launch the Triton kernel."""
    rows, words = logits.shape
    launch(
        cross_entropy_kernel,
        rows,
        (logits, targets, losses, divisor),
        ignore_index,
        (),
        (words, logits.stride(0), softcap, writes, LANES),
        OPTIONS,
        device_index=logits.get_device(),
    )


def cross_entropy_reference(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, divisor: torch.Tensor, **options: Any
) -> None:
    """What ``launch_cross_entropy`` computes, in plain torch, for any device and from the same arguments.

    It takes few rows at a time, to need little memory.
    """
    by_rows = (tensor.split(_REFERENCE_ROWS) for tensor in (logits, targets, losses))
    for own_logits, own_targets, own_losses in zip(*by_rows, strict=True):
        _reference(own_logits, own_targets, own_losses, divisor, **options)


def _reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    divisor: torch.Tensor,
    *,
    ignore_index: int,
    softcap: float,
    writes: bool,
) -> None:
    counts = targets != ignore_index
    is_word = (targets >= 0) & (targets < logits.shape[1])
    own = torch.where(counts & is_word, targets, 0)[:, None]
    values = logits.float()
    if softcap:
        values = softcap * torch.tanh(values / softcap)
    lse = values.logsumexp(dim=1, keepdim=True)
    target = values.gather(1, own)
    loss = lse - target
    losses.copy_(torch.where(counts, torch.where(is_word, loss[:, 0], torch.nan), 0.0))
    if writes:
        slope = torch.exp(values - lse)
        slope.scatter_add_(1, own, torch.full_like(target, -1.0))
        if softcap:
            slope *= 1 - (values / softcap).square()
        slope /= torch.where(is_word, divisor, torch.nan)[:, None]
        logits.copy_(torch.where(counts[:, None], slope, 0.0))
