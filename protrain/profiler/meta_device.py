"""Makes the meta device behave like a GPU in a trace: fused attention, and answers to questions about values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from protrain.forward.dispatch import RuntimeMode

_USUAL = F.scaled_dot_product_attention


@contextmanager
def as_if_on_gpu() -> Iterator[None]:
    """Inside, meta tensors run fused attention and answer ``bool(tensor)``."""
    with _Values(), FusedAttention():
        yield


@contextmanager
def fused_attention_in_graphs() -> Iterator[None]:
    """Inside, forwards that are compiled on the meta device run fused attention, without a function mode.

    The compiler would trace a function mode around every operator. It takes this one operator as it is, where code
    calls it through torch.nn.functional.
    """

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        result = _fused(*args, **kwargs)
        return _USUAL(*args, **kwargs) if result is None else result

    vars(F)["scaled_dot_product_attention"] = torch.compiler.allow_in_graph(attention)
    try:
        yield
    finally:
        vars(F)["scaled_dot_product_attention"] = _USUAL


class FusedAttention(TorchFunctionMode):
    """Runs attention as the fused kernel of GPUs, which saves q, k, v, the output and one fp32 value per row.

    The meta device alone would use the plain formula, which saves sequence x sequence matrices. Grouped keys and values
    stay as they are, because only shapes count here.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or the fused kernel if ``func`` is attention."""
        kwargs = kwargs or {}
        if func is not _USUAL:
            return func(*args, **kwargs)
        result = _fused(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention of meta tensors [batch, heads, sequence, head size], or None where a GPU would run no fused kernel."""
    learned_mask = attn_mask is not None and attn_mask.requires_grad
    if not query.is_meta or query.ndim != 4 or learned_mask or query.shape[-1] != value.shape[-1]:
        return None
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


class _Values(RuntimeMode):
    """Answers questions about tensors without data as if all values were regular: all() is true and any() is false."""

    def __init__(self) -> None:
        super().__init__()
        self._any_results = WeakIdKeyDictionary()  # results of any()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, unless it asks for a value."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0] not in self._any_results if args[0].dtype == torch.bool else 1
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket is torch.ops.aten.any:
            self._any_results[result] = True
        return result
