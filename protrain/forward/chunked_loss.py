"""Computes the loss of a causal language model piece by piece, so that its logits never exist whole.

The model's code stays as it is; three of its functions are replaced. When the model's forward begins, its labels are
put aside. Where its head would compute logits, it computes the loss by ``protrain_kernels.linear_cross_entropy`` and
returns a placeholder. When its loss function is given the placeholder, it returns that loss. So the head's weight is
used inside the head's own forward, while the engine has it on the device.

[Note: the same loss] Some models scale their logits or cap them before the loss. So the model's forward is run once
with a stand-in for everything before the head, which returns zeros, and one for the head, which returns known logits.
What the loss function is given shows what the model does to logits. The loss is computed in pieces if that is nothing,
or a cap by a tanh, which the kernel can do as well.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from protrain.common.errors import MisuseError
from protrain.common.trees import map_leaves
from protrain.forward.compilation import replace_attributes
from protrain_kernels import linear_cross_entropy

_PASSED_ON = ("num_items_in_batch", "shift_labels", "ignore_index")
_CASTS = {"to", "float", "bfloat16", "half", "contiguous", "detach"}
# These attributes of later logits are those of the tensor without elements that stands for them: whole logits have the
# same values of them, or they are about memory.
_OWN = (
    {"dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf"}
    | {"is_cuda", "is_meta", "is_sparse", "is_nested", "is_inference"}
    | {"untyped_storage", "data_ptr", "_version"}
)
_LARGE = 1000.0  # a logit that every cap reaches


class _Head:
    """The three replaced functions of one model, and what they share during a forward."""

    def __init__(self, model: Any, head: nn.Linear, softcap: float, between: set[str]) -> None:
        self.head = head
        self.softcap = softcap
        self.between = between  # the names of the functions by which the model makes of logits what the loss is given
        self.model_forward = model.forward
        self.head_forward = head.forward
        self.loss_function = model.loss_function
        self.signature = inspect.signature(model.forward)
        self.options: dict[str, Any] | None = None  # labels and the other arguments of the loss, inside the forward
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
            self.options = self.loss = None

    def run_head(self, hidden: Tensor) -> Tensor:
        """Compute the loss in place of the logits. Without labels, compute the logits."""
        if self.options is None:
            return self.head_forward(hidden)
        self.loss = causal_lm_loss(hidden, self.head.weight, self.head.bias, softcap=self.softcap, **self.options)
        logits = self.later(hidden.detach().new_empty((*hidden.shape[:-1], 0)), hidden)
        if self.loss.requires_grad:
            self.loss.register_hook(functools.partial(_forget, weakref.ref(logits)))
        return logits

    def later(self, empty: Tensor, hidden: Tensor | None, source: Callable[[], Tensor] | None = None) -> LaterLogits:
        """Logits of the type of ``empty``, of ``hidden`` or of ``source``."""
        logits = empty.as_subclass(LaterLogits)
        logits.head, logits.hidden, logits.source = self, hidden, source
        return logits

    def run_loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the loss that the head computed."""
        if self.options is None:
            return self.loss_function(logits, *args, **kwargs)
        return self.loss


class LaterLogits(Tensor):
    """Logits that are computed when something is done with them, in place of which there is a tensor without elements.

    Most scripts never look at them. They, and the hidden states that they are computed of, are kept until the backward
    of the loss begins, as the plan has no room for them then. A cast of such logits is done later as well, and so is
    what the model does to them before the loss, which is computed without them.
    """

    head: _Head
    hidden: Tensor | None  # of which the head computes these logits
    computed: Tensor | None = None  # these logits, until the backward of the loss begins
    source: Callable[[], Tensor] | None  # by which these logits are computed of others, in place of ``hidden``

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` with the logits."""
        first, more = args[0], kwargs or {}
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(first, cls) and (name in _CASTS or (first.head.options and name in first.head.between)):
                return first.head.later(func(*args, **more), None, lambda: func(first.whole(), *args[1:], **more))
            if name not in _OWN:
                args, more = map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, cls) else leaf, (args, more))
            return func(*args, **more)

    def whole(self) -> Tensor:
        """The logits, which the head computes again."""
        if self.source is not None:
            return self.source()
        if self.head.options is not None:
            raise ValueError(
                "something uses the logits before the loss, which is computed without them: pass chunked_loss=False"
            )
        if self.hidden is None:
            raise MisuseError(
                "these logits were not computed in forward, and now that backward has begun it is too late: use them "
                "before, or pass chunked_loss=False"
            )
        if self.computed is None or torch.is_grad_enabled() > self.computed.requires_grad:
            self.computed = self.head.head(self.hidden)
        return self.computed


def _forget(logits: weakref.ref[LaterLogits], gradient: Tensor) -> None:
    known = logits()
    if known is not None:
        known.hidden = known.computed = None


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    num_items_in_batch: int | Tensor | None = None,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
) -> Tensor:
    """The loss ``ForCausalLMLoss`` of transformers, a scalar in fp32.

    Args:
        hidden: [batch, sequence, hidden].
        weight: [words, hidden], of the head.
        bias: [words], of the head, or none.
        labels: [batch, sequence].
        num_items_in_batch: the divisor of the sum of losses. If it is None, that is the number of labels that count.
        shift_labels: labels that are shifted already.
        ignore_index: the label that does not count.
        softcap: the cap of the logits, or 0.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        shift_labels.reshape(-1).to(hidden.device),
        bias=bias,
        divisor=num_items_in_batch,
        ignore_index=ignore_index,
        softcap=softcap,
    )


def chunk_loss(model: nn.Module) -> Callable[[], None]:
    """Replace the loss of ``model``, or of the one language model inside it. Returns a function that undoes it.

    Whenever labels are given, the output's ``logits`` are only computed when something is done with them.

    Raises:
        ValueError: it is not known to be the same loss. See [Note: the same loss].
    """
    found = _find(model)
    if found is None:
        raise ValueError(
            f"chunked_loss=True works with causal language models of transformers, not with {type(model).__name__}: "
            "leave it out"
        )
    language_model, head = found
    used = _Used(head.out_features)
    softcap = _softcap(language_model, head, used)
    if softcap is None:
        raise ValueError(
            f"chunked_loss=True does not work with {type(language_model).__name__}, which changes its logits before "
            "the loss: leave it out"
        )
    shared = _Head(language_model, head, softcap, used.names)
    # Both have the signatures of the originals, because libraries inspect them.
    return replace_attributes(
        [
            (language_model, "forward", functools.wraps(shared.model_forward)(functools.partial(shared.run_model))),
            (head, "forward", functools.wraps(shared.head_forward)(functools.partial(shared.run_head))),
            (language_model, "_loss_function", shared.run_loss),
        ]
    )


def can_chunk(model: nn.Module) -> bool:
    """Whether ``chunk_loss`` works with ``model``."""
    try:
        chunk_loss(model)()
    except ValueError:
        return False
    return True


def is_chunked(model: nn.Module) -> bool:
    """Whether ``chunk_loss`` replaced the loss of ``model``."""
    return any(isinstance(getattr(vars(m).get("_loss_function"), "__self__", None), _Head) for m in model.modules())


def _find(model: nn.Module) -> tuple[Any, nn.Linear] | None:
    """The one language model that ``model`` is or has inside, as an adapter's model has, and its head."""
    found = [module for module in model.modules() if hasattr(type(module), "loss_function") and _head_of(module)]
    return (found[0], _head_of(found[0])) if len(found) == 1 else None


def _head_of(module: Any) -> Any:
    """The linear layer that computes logits for the usual loss, or None.

    The loss is compared by name: a model with a loss of its own, or with other shifting, has a function of another
    name. A model with an encoder has this name by default, and does not use the function.
    """
    find: Callable[[], Any] = getattr(module, "get_output_embeddings", lambda: None)
    head: Any = find()
    usual = getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss"
    if not usual or getattr(module.config, "is_encoder_decoder", False) or not isinstance(head, nn.Linear):
        return None
    changed = type(head).forward is not nn.Linear.forward or "forward" in vars(head)
    return None if changed or head._forward_hooks or head._forward_pre_hooks else head


class _Output:
    """What the model before the head returns: hidden states first, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _Used(TorchFunctionMode):
    """Records the names of the functions that are called with tensors of as many columns as there are words."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = words
        self.names = set[str]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``. What it reads of a tensor is not recorded."""
        if func.__name__ != "__get__" and any(isinstance(arg, Tensor) and self.words in arg.shape[-1:] for arg in args):
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def _softcap(model: Any, head: nn.Linear, used: _Used) -> float | None:
    """The cap of the model's logits, 0 if it does not change them, or None. See [Note: the same loss]."""
    if model.base_model is model:
        return None
    plain = torch.linspace(-_LARGE, _LARGE, head.out_features).expand(1, 2, -1)
    given: list[Tensor] = []
    hidden = _Output(torch.zeros(1, 2, head.in_features))
    undo = replace_attributes(
        [
            (model, "_loss_function", lambda logits, *_, **__: given.append(logits)),
            *((module, "forward", lambda *_, **__: hidden) for module in model.base_model.modules()),
            (head, "forward", lambda _: plain),
        ]
    )
    labels = torch.zeros(1, 2, dtype=torch.int64)
    try:
        with suppress(Exception), torch.no_grad(), used:  # a model that expects more is not known
            model.forward(input_ids=labels, labels=labels)
    finally:
        undo()
    if not given or given[0].shape != plain.shape:
        return None
    if torch.equal(given[0], plain):
        return 0.0
    cap = float(given[0].max())
    return cap if torch.allclose(given[0], cap * torch.tanh(plain / cap)) else None
