"""Stands in for Liger's fused linear cross-entropy on the meta device, with its memory and its matrix products.

It follows the order of LigerForCausalLMLoss and LigerFusedLinearCrossEntropyFunction of liger-kernel 0.8.5, on a GPU
that has bfloat16 (compute capability 8), without autocast. For hidden states [n, h], a weight [v, h] and 16-bit
elements:

    all the time   gradient of the hidden states, 2 n h bytes; a sum of the weight's gradient in fp32, 4 v h
    in the loop    one piece of logits, which its own gradient overwrites, about 2 n h (never less than 2 v)
    at the end     in place of the piece the weight's gradient in 16 bits, 2 v h, from here on in place of the sum

Forward computes all of it, with the three products of h x v for every row. Backward passes the two gradients on. In
fp32, Liger computes the share of each piece in the weight's gradient, 4 v h, before it adds the share to the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def causal_lm_loss(
    *,
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    hidden_size: int,
    accum_dtype: torch.dtype,
    bias: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """A loss without a value: a scalar in fp32 with a graph.

    Args:
        hidden_states: [batch, sequence, hidden], on the meta device.
        lm_head_weight: [vocabulary, hidden].
        labels: [batch, sequence].
        hidden_size: the last dimension of ``hidden_states``.
        accum_dtype: the type in which the gradients of weight and bias are summed.
        bias: [vocabulary], or none.
        num_items_in_batch: the divisor of the sum of losses. If it is None, that is the number of labels that count.
        shift_labels: labels that are shifted already.
        ignore_index: the label that does not count.
    """
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    hidden = hidden_states.view(-1, hidden_size)
    loss: Tensor = _Fused.apply(hidden, lm_head_weight, shift_labels.view(-1), bias, ignore_index, accum_dtype)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def piece_rows(rows: int, hidden: int, vocabulary: int) -> int:
    """The rows of a piece of logits: a power of two, so that a piece is about as large as the hidden states."""
    pieces = -(-vocabulary // hidden)
    return min(1 << (-(-rows // pieces) - 1).bit_length(), rows)


class _Fused(torch.autograd.Function):
    """LigerFusedLinearCrossEntropyFunction with the mean or sum of the losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        accum_dtype: torch.dtype,
    ) -> Tensor:
        """Compute the loss and all gradients."""
        assert hidden.is_meta, "nothing here computes a value"
        rows, vocabulary = len(hidden), len(weight)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = grad_bias = None
        if hidden.requires_grad:
            if weight.requires_grad:
                grad_weight = torch.zeros_like(weight, dtype=accum_dtype)
            if bias is not None:
                grad_bias = torch.zeros_like(bias, dtype=accum_dtype)
        losses = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        counted = target != ignore_index
        counted.sum()
        piece = piece_rows(rows, hidden.shape[1], vocabulary)
        storage = torch.empty((piece, vocabulary), dtype=hidden.dtype, device=hidden.device)
        for start in range(0, rows, piece):
            part = hidden[start : start + piece]
            logits = storage[: len(part)]
            torch.mm(part, weight.t(), out=logits)
            if bias is not None:
                logits.add_(bias)
            # Here the kernel overwrites the piece with its own gradient, and uses no memory besides `losses`.
            if hidden.requires_grad:
                torch.mm(logits, weight, out=grad_hidden[start : start + piece])
            # In 16 bits the third product adds to its fp32 sum in place, which some versions of torch cannot do on
            # meta.
            if grad_weight is not None and hidden.dtype == torch.float32:
                grad_weight += torch.mm(logits.t(), part)
            if grad_bias is not None:
                torch.add(grad_bias, logits.sum(dim=0), out=grad_bias)
        del storage, logits
        loss = losses.sum()
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that forward computed.

        Liger multiplies them in place unless the loss has a gradient of one.
        """
        gradients[0].new_ones(())  # the one that it is compared with
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        return grad_hidden, grad_weight, None, grad_bias, None, None
