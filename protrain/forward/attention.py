"""Recognises attention operators, whose outputs cost much time to compute and little memory to keep."""

from __future__ import annotations

import functools
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


@functools.cache  # asked for every operator of a block
def is_attention(operator: Any) -> bool:
    """Whether ``operator``, as a dispatch mode sees it, is the forward of a fused attention kernel.

    The plain formula consists of several operators, and autograd saves sequence x sequence matrices of it. Its output
    is not worth keeping.
    """
    return isinstance(operator, OpOverload) and operator._schema.name in _NAMES


def for_backward(outputs: Any) -> Tensor | None:
    """The output of attention that only its own backward uses: the sums of exponentials.

    It is None if there are no such sums. A kernel that knows of no backward leaves them out, or empty.
    """
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        return None
    found = outputs[1]
    return found if isinstance(found, Tensor) and found.numel() else None
