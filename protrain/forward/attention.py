"""Attention operators: what a block computes that costs much time and leaves little behind."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

_NAMES = {
    *(
        f"aten::_scaled_dot_product_{kind}"
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    ),
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    *(
        f"{package}::_flash_attn{kind}forward"
        for package in ("flash_attn", "flash_attn_3")
        for kind in ("_", "_varlen_")
    ),
}


def is_attention(operator: Any) -> bool:
    """Whether ``operator``, as a dispatch mode sees it, is the forward of a fused attention.

    The plain formula is several operators, of which autograd keeps sequence x sequence matrices: nothing worth keeping.
    """
    return isinstance(operator, OpOverload) and operator._schema.name in _NAMES


def for_backward(outputs: Any) -> Tensor | None:
    """Of what such an operator puts out, the tensor that nothing but its own backward uses: the sums of exponentials.

    None where there are no such sums: a kernel that is told of no backward leaves them out, or empty.
    """
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        return None
    found = outputs[1]
    return found if isinstance(found, Tensor) and found.numel() else None
