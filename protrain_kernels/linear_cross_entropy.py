"""The cross-entropy of a linear layer's outputs piece by piece, so that logits never exist whole.

For 16,384 tokens and 128,256 words the logits, their copy in fp32 and both gradients are 25 GB. Here there is one piece
of logits at a time, which its own gradient overwrites. Forward computes all gradients, as it has the logits: three
products of rows x hidden x words. Backward multiplies them by the gradient of the loss. The gradients of weight and
bias are summed over the pieces in fp32 and rounded once, in backward.

Nothing waits for the device: what is counted there stays there.

Bytes, for n rows, h hidden and v words, 16-bit elements, and pieces of p rows:

    in forward     gradient of the hidden states, 2 n h; sums of the weight's gradient, 4 v h; a piece of logits, 2 p v
    until backward the gradient and the sums
    in backward    the gradients that are returned as well, 2 n h and 2 v h
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from protrain_kernels.cross_entropy import cross_entropy_reference, launch_cross_entropy

_ROW_ELEMENTS = 8  # products are slow where a row of logits is no multiple of this, as with the 50,257 words of GPT-2
_WIDE_ROW_ELEMENTS = 64  # such a row is widened to a multiple of this
_FP16_FACTOR = 1024.0  # of gradients until backward: 1 becomes large, and what a product makes of it is no infinity
_PIECE_ROWS = 128  # a piece is a multiple of this
_FROZEN_ROWS = 1024  # of a piece at most, where only the products matter
_TRAINED_ROWS = 2048  # and where each piece is added to the sums as well, so that fewer pieces move fewer bytes


def piece_rows(rows: int, hidden: int, *, trained: bool) -> int:
    """How many of ``rows`` make a piece. It depends on the shape alone, so that the bits depend on nothing else.

    A trained weight has larger pieces. Up to ``hidden`` rows they take no memory, as the gradient in 16 bits, which is
    as large, comes in their place.
    """
    most = max(_TRAINED_ROWS, hidden) if trained else _FROZEN_ROWS
    pieces = max(1, -(-rows // most))
    return min(-(-rows // (pieces * _PIECE_ROWS)) * _PIECE_ROWS, rows)


def linear_cross_entropy(
    hidden: Tensor,  # [rows, hidden] bfloat16, float16 or float32
    weight: Tensor,  # [words, hidden] of the same type
    targets: Tensor,  # [rows] int64
    *,
    bias: Tensor | None = None,  # [words] of the same type
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> Tensor:
    """The cross-entropy of ``hidden @ weight.T + bias`` with ``targets``, a scalar in fp32.

    Under autocast, hidden states, weight and bias are cast as for a linear layer.

    Args:
        hidden: [rows, hidden], on a GPU, the CPU or the meta device.
        weight: [words, hidden].
        targets: [rows] int64. One that is no word makes the loss NaN.
        bias: [words].
        divisor: what the sum of losses is divided by, a number or one value. By default that is the number of targets
            that count, and the loss is NaN if none does.
        ignore_index: the target of rows that do not count.
        softcap: logits become ``softcap * tanh(logits / softcap)``, unless it is 0.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"hidden states {[*hidden.shape]} need as many targets of int64, not {[*targets.shape]} of {targets.dtype}"
        )
    if targets.device != hidden.device:  # a kernel would read an address that is none there
        raise ValueError(f"targets are on {targets.device} and hidden states on {hidden.device}")
    # The meta device stands for whichever device something is counted for.
    kind = "cuda" if hidden.is_cuda or (hidden.is_meta and torch.is_autocast_enabled("cuda")) else "cpu"
    if torch.is_autocast_enabled(kind):
        hidden, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (hidden, weight))
        bias = None if bias is None else bias.to(weight.dtype)
    if divisor is None:
        divisor = (targets != ignore_index).sum()
    elif not isinstance(divisor, Tensor) or divisor.device != hidden.device:  # a copy of a scalar would be waited for
        divisor = hidden.new_full((), float(divisor), dtype=torch.float32)
    options = {"ignore_index": ignore_index, "softcap": softcap}
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden, weight, bias, targets.contiguous(), divisor.float().reshape(()), options, torch.is_grad_enabled()
        )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        divisor: Tensor,
        options: dict[str, Any],
        differentiated: bool,
    ) -> Tensor:
        (rows, width), words = hidden.shape, len(weight)
        for_hidden, for_weight, for_bias = (differentiated and needed for needed in ctx.needs_input_grad[:3])
        writes = for_hidden or for_weight or for_bias
        weight, bias = _widened(weight, bias)
        losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        first_sum = torch.empty_like if rows else torch.zeros_like  # the first piece is written there
        weight_sum = first_sum(weight, dtype=torch.float32) if for_weight else None
        bias_sum = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and for_bias else None
        # In fp16 most of a gradient that is divided by thousands would be 0, and a loss scale comes only in backward.
        ctx.late_factor = 1 / divisor / _FP16_FACTOR if hidden.dtype == torch.float16 else None
        written_divisor = divisor if ctx.late_factor is None else torch.full_like(divisor, 1 / _FP16_FACTOR)
        piece = piece_rows(rows, width, trained=for_weight)
        storage = hidden.new_empty(piece, len(weight))
        for start in range(0, rows, max(1, piece)):
            own = slice(start, start + piece)
            part = hidden[own]
            logits = storage[: len(part)]
            if bias is None:
                torch.mm(part, weight.t(), out=logits)
            else:
                torch.addmm(bias, part, weight.t(), out=logits)
            if not hidden.is_meta:
                compute = launch_cross_entropy if hidden.is_cuda else cross_entropy_reference
                compute(logits[:, :words], targets[own], losses[own], written_divisor, writes=writes, **options)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[own])
            if weight_sum is not None:
                _add_product(weight_sum, logits.t(), part, first=start == 0)
            if bias_sum is not None:
                bias_sum += logits.sum(dim=0, dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, weight_sum, bias_sum)
        ctx.dtype, ctx.words = hidden.dtype, words
        return losses.sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *sums = ctx.saved_tensors
        factor = grad_loss if ctx.late_factor is None else grad_loss * ctx.late_factor
        sums = hidden, *(None if each is None else each[: ctx.words] for each in sums)
        made = (
            each if each is None else torch.mul(each, factor, out=torch.empty_like(each, dtype=ctx.dtype))
            for each in sums
        )
        return *made, None, None, None, None


def _widened(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias with words of zeros behind, until rows of logits are aligned.

    The cross-entropy neither reads nor writes the logits of these words, which are zero. So nothing depends on them.
    """
    missing = -len(weight) % _WIDE_ROW_ELEMENTS
    if len(weight) % _ROW_ELEMENTS == 0:
        return weight, bias
    bias = None if bias is None else torch.cat([bias, bias.new_zeros(missing)])
    return torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]), bias


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add ``left @ right`` to ``total``, which is in fp32, or write it there if it is the first."""
    if right.is_meta:  # neither memory nor time of the host, and some versions of torch cannot do it there
        return
    more: dict[str, Any] = {}
    if right.dtype != torch.float32:
        if right.is_cuda:
            more["out_dtype"] = torch.float32
        else:
            left, right = left.float(), right.float()
    if first:
        torch.mm(left, right, out=total, **more)
    else:
        torch.addmm(total, left, right, out=total, **more)
