"""Computes the loss of a causal language model piece by piece with Liger's kernels, so the logits never exist whole.

For a batch of 65,536 tokens and 32,000 words, the logits, their fp32 copy and both gradients are 25 GB. Liger's fused
linear cross-entropy goes through them in pieces and returns the gradients of the hidden states and of the weight.

The model's code stays as it is; three of its functions are replaced. When the model's forward begins, its labels are
put aside. Where its head would compute logits, it computes the loss and returns a placeholder. When its loss function
is given the placeholder, it returns that loss. So the head's weight is used inside the head's own forward, while the
engine has it on the device.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from protrain.forward import liger
from protrain.forward.chunked_loss_on_meta import causal_lm_loss
from protrain.forward.replacing import replace_attributes

_ROW_BYTES = 16  # products are slow if the bytes of a row of logits are no multiple of this
_WIDE_ROW_BYTES = 128  # such a row is widened to a multiple of this
_PASSED_ON = ("num_items_in_batch", "shift_labels", "ignore_index")


class _Head:
    """The three replaced functions of one model, and what they share during a forward."""

    def __init__(self, model: Any, head: Any, compute: Callable[..., Tensor]) -> None:
        self.compute = compute
        self.head = head
        self.model_forward = model.forward
        self.head_forward = head.forward
        self.loss_function = model.loss_function
        self.signature = inspect.signature(model.forward)
        self.options: dict[str, Any] | None = None  # labels and the other arguments of the loss
        self.placeholder: Tensor | None = None
        self.loss: Tensor | None = None

    def run_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward with its labels put aside."""
        given = self.signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if given.get("labels") is not None:
            self.options = {name: given[name] for name in ("labels", *_PASSED_ON) if given.get(name) is not None}
        try:
            return self.model_forward(*args, **kwargs)
        finally:
            self.options = self.placeholder = self.loss = None

    def run_head(self, hidden: Tensor) -> Tensor:
        """Compute the loss in place of the logits. Without labels, compute the logits."""
        if self.options is None:
            return self.head_forward(hidden)
        weight, bias = widened(self.head.weight, self.head.bias)
        self.loss = self.compute(
            hidden_states=hidden,
            lm_head_weight=weight,
            bias=bias,
            hidden_size=hidden.shape[-1],
            accum_dtype=torch.float32,
            **self.options,
        )
        self.placeholder = hidden.new_empty((*hidden.shape[:-1], 0))
        return self.placeholder

    def run_loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the loss that the head computed."""
        if self.options is None:
            return self.loss_function(logits, *args, **kwargs)
        if logits is not self.placeholder:
            raise ValueError(
                "chunked_loss=True does not work with a model that changes its logits before the loss; leave it out"
            )
        return self.loss


def widened(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pad a head's weight [words, hidden] and bias [words] with unused words, until rows of logits are aligned.

    GPT-2 has 50,257 words, and products that read or write rows of that length are slow
    (bench/results/h100/NOTES.md). The added words have a bias of -inf, so they add nothing to the sum of exponentials.
    Their gradients are all zero and are dropped.
    """
    size = weight.element_size()
    if len(weight) * size % _ROW_BYTES == 0:
        return weight, bias
    missing = -len(weight) % (_WIDE_ROW_BYTES // size)
    if bias is None:
        bias = weight.new_zeros(len(weight))
    return (
        torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]),
        torch.cat([bias, bias.new_full((missing,), -torch.inf)]),
    )


def find_head(model: nn.Module, device: torch.device, *, on_meta: bool = False) -> nn.Linear:
    """The module that computes the logits of ``model``, if ``chunk_loss`` can take its place.

    Raises:
        ValueError: Liger is not installed, the model is no causal language model of transformers, or there is no GPU.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("chunked_loss=True needs a CUDA GPU: leave it out on a CPU")
    if not on_meta and not liger.is_installed():
        raise ValueError("chunked_loss=True needs the package liger-kernel: pip install 'protrain[liger]'")
    kind: Any = model
    find: Callable[[], Any] = getattr(kind, "get_output_embeddings", lambda: None)
    head = find()
    # The loss is compared by name: a model with a loss of its own, or with other shifting, has a function of another
    # name. A model with an encoder has this name by default, and does not use the function.
    loss = getattr(getattr(kind, "loss_function", None), "__name__", "")
    has_encoder = getattr(getattr(kind, "config", None), "is_encoder_decoder", False)
    if not isinstance(head, nn.Linear) or loss != "ForCausalLMLoss" or has_encoder:
        raise ValueError(
            f"chunked_loss=True works with causal language models of transformers, not with {type(model).__name__}: "
            "leave it out"
        )
    return head


def chunk_loss(model: nn.Module, device: torch.device, *, on_meta: bool = False) -> Callable[[], None]:
    """Replace the loss of ``model``. Returns a function that undoes it.

    Whenever labels are given, the output's ``logits`` have no elements.

    Args:
        model: a causal language model of transformers.
        device: where it trains.
        on_meta: whether it is only traced on the meta device, as if on ``device``. That needs neither a GPU nor Liger.

    Raises:
        ValueError: as ``find_head``.
    """
    head = find_head(model, device, on_meta=on_meta)
    kind: Any = model
    shared = _Head(kind, head, causal_lm_loss if on_meta else liger.import_loss())
    return replace_attributes(
        [
            (kind, "forward", _like(shared.model_forward, shared.run_model)),
            (head, "forward", _like(shared.head_forward, shared.run_head)),
            (kind, "_loss_function", shared.run_loss),
        ]
    )


def is_chunked(model: nn.Module) -> bool:
    """Whether ``chunk_loss`` replaced the loss of ``model``."""
    return isinstance(getattr(vars(model).get("_loss_function"), "__self__", None), _Head)


def _like(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` with the signature of ``original``, because libraries inspect it."""
    return functools.update_wrapper(functools.partial(method), original)
