"""Dispatch modes that must not change what is compiled, and the operators that such modes recognise.

The outputs of attention cost much time to compute and little memory to keep.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class RuntimeMode(TorchDispatchMode):
    """A dispatch mode that only watches. A forward is compiled as it would be without the mode, and seen when it runs.

    Inside a compiled forward the mode sees only the operators that the compiler left to libraries. Operators that take
    other operators pass through.

    Inside any dispatch mode torch does not count what operators on lists (``torch._foreach_mul_``) write in the
    versions of tensors, by which a change is found. So this mode does.
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run ``func``, and count what it writes to a list of tensors."""
        if args and isinstance(args[0], list) and func._schema.arguments[0].is_write:
            torch.autograd.graph.increment_version(args[0])
        return func(*args, **(kwargs or {}))


def detached(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph, as an output that refers to its own node would never be freed.

    Dispatch modes do not see this operation. The engine has such a mode while a block is recomputed, and a call of it
    would take longer than everything else here. A class that dispatches operations itself still sees it.
    """
    if not torch._C._len_torch_dispatch_stack() or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_((flash|efficient|cudnn)_attention|flash_attention_for_cpu|fused_attention_overrideable)"
    r"|aten::_(flash|efficient)_attention_forward|flash_attn(_3)?::_flash_attn_(varlen_)?forward"
)


@functools.cache  # asked for every operator of a block
def is_attention(operator: Any) -> bool:
    """Whether ``operator``, as a dispatch mode sees it, is the forward of a fused attention kernel.

    The plain formula consists of several operators, and autograd saves sequence x sequence matrices of it. Its output
    is not worth keeping.
    """
    return isinstance(operator, OpOverload) and _ATTENTION.fullmatch(operator._schema.name) is not None


def for_backward(outputs: Any) -> Tensor | None:
    """The output of attention that only its own backward uses: the sums of exponentials.

    It is None if there are no such sums. A kernel that knows of no backward leaves them out, or empty.
    """
    if not isinstance(outputs, tuple) or len(outputs) < 2:
        return None
    found = outputs[1]
    return found if isinstance(found, Tensor) and found.numel() else None
