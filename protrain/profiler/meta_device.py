"""What the meta device lacks for tracing a step meant for a GPU: fused attention, and answers about values."""

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
    """Meta tensors inside run fused attention and answer ``bool(tensor)``."""
    with _Values(), FusedAttention():
        yield


@contextmanager
def fused_attention_in_graphs() -> Iterator[None]:
    """The same attention for forwards that are compiled inside, outside of any function mode.

    The compiler would trace such a mode around every operator. This one operator it takes as it is, where it is called
    as that of torch.nn.functional.
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
    """Runs attention as the fused kernel that saves q, k, v, the output and one fp32 a row, as GPUs do.

    Keys and values of fewer heads stay as they are: only shapes count here. The meta device itself would take the plain
    formula, which saves sequence x sequence matrices.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or the fused kernel in its place."""
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
    """Attention of [batch, heads, sequence, head size] meta tensors; None where no fused kernel would run."""
    learned_mask = attn_mask is not None and attn_mask.requires_grad
    if not query.is_meta or query.ndim != 4 or learned_mask or query.shape[-1] != value.shape[-1]:
        return None
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


class _Values(RuntimeMode):
    """Answers for tensors without data: whatever is tested is regular, so all() holds and any() does not."""

    def __init__(self) -> None:
        super().__init__()
        self._doubts = WeakIdKeyDictionary()  # results of any()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, unless it asks for a value."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0] not in self._doubts if args[0].dtype == torch.bool else 1
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket is torch.ops.aten.any:
            self._doubts[result] = True
        return result
