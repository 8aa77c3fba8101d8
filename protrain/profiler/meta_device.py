"""Makes the meta device behave like a GPU in a trace: fused attention, and answers to questions about values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from protrain.common.trees import map_leaves, tensors_in
from protrain.forward.dispatch import RuntimeMode

_USUAL = F.scaled_dot_product_attention


@contextmanager
def as_if_on_gpu(known: KnownIntegers | None = None, *, compiled: bool = False) -> Iterator[None]:
    """Inside, meta tensors run fused attention and answer ``bool(tensor)``, truly where that follows from ``known``.

    Attention is replaced in torch.nn.functional and in modules that have imported it from there by its name, in
    backward too. With ``compiled`` the compiler takes this one operator as it is.
    """
    replacement = torch.compiler.allow_in_graph(_attention) if compiled else _attention
    others = [vars(module) for name, module in list(sys.modules.items()) if not name.startswith("torch.")]
    importers = [names for names in others if names.get(_USUAL.__name__) is _USUAL]
    for names in (vars(F), *importers):
        names[_USUAL.__name__] = replacement
    try:
        with _Values(known or KnownIntegers()):
            yield
    finally:
        for names in (vars(F), *importers):
            names[_USUAL.__name__] = _USUAL


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of meta tensors [batch, heads, sequence, head size] as the fused kernel of GPUs.

    The fused kernel saves q, k, v, the output and one fp32 value per row. The meta device alone would use the plain
    formula, which saves sequence x sequence matrices. Grouped keys and values stay as they are, because only shapes
    count here. Where a GPU would run no fused kernel, this function calls torch's own.
    """
    learned_mask = attn_mask is not None and attn_mask.requires_grad
    if not query.is_meta or query.ndim != 4 or learned_mask or query.shape[-1] != value.shape[-1]:
        return _USUAL(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


class KnownIntegers:
    """The values of meta tensors of integers that follow from those of a batch.

    A model may ask for them to decide what it computes. From positions that begin anew, as in packed rows, those of
    transformers see that attention needs a mask.
    """

    def __init__(self) -> None:
        self.values = WeakIdKeyDictionary()  # from a tensor whose values are known to these
        self._most = 0  # elements of a tensor that is followed: twice as many as the batch's largest, and so no mask

    def moved(self, tensor: Tensor) -> Tensor:
        """``tensor``, which a batch has, on the meta device."""
        on_meta = tensor.to("meta")
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta):
            self.values[on_meta] = tensor.cpu()
            self._most = max(self._most, 2 * tensor.numel())
        return on_meta

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note the values of the ``result`` of ``func``, if they follow from those that are known."""
        if not self.values or getattr(func, "namespace", "") != "aten":
            return
        if func._schema.is_mutable:  # a tensor that is changed may have views
            if any(tensor in self.values for tensor in tensors_in((args, kwargs))):
                self.values.clear()
        elif isinstance(result, Tensor) and not result.is_floating_point() and result.numel() <= self._most:
            given = tensors_in((args, kwargs))
            if given and all(tensor in self.values for tensor in given):
                args, kwargs = map_leaves(self._on_cpu, (args, kwargs))
                self.values[result] = func(*args, **kwargs)

    def _on_cpu(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.values[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


class _Values(RuntimeMode):
    """Answers questions about tensors without data.

    What does not follow from the batch is answered as if all values were regular: all() is true and any() is false.
    """

    def __init__(self, known: KnownIntegers) -> None:
        super().__init__()
        self._known = known
        self._any_results = WeakIdKeyDictionary()  # results of any()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, unless it asks for a value."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            value = self._known.values.get(args[0])
            if value is not None:
                return value.item()
            return args[0] not in self._any_results if args[0].dtype == torch.bool else 1
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten.any:
            self._any_results[result] = True
        self._known.follow(func, args, kwargs, result)
        return result
