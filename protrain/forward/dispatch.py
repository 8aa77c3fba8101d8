"""Dispatch modes that must not change what is compiled, and the attention operators that such modes recognise.

The outputs of attention cost much time to compute and little memory to keep.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class RuntimeMode(TorchDispatchMode):
    """A dispatch mode that only watches. A forward is compiled as it would be without the mode, and seen when it runs.

    Inside a compiled forward the mode sees only the operators that the compiler left to libraries. Operators that take
    other operators pass through.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that compilation ignores this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch puts a guard against the compiler around every call of the mode.

        The guard takes time in every call and is not needed: the compiler leaves the code of this package alone
        (``protrain.forward.compilation.compile_blocks``).
        """
        return False


def detached(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph, as an output that refers to its own node would never be freed.

    Dispatch modes do not see this operation. The engine has such a mode while a block is recomputed, and a call of it
    would take longer than everything else here. A class that dispatches operations itself still sees it.
    """
    if not torch._C._len_torch_dispatch_stack() or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


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
