"""Dispatch modes that must not change what is compiled."""

from __future__ import annotations

import torch
from torch import Tensor
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
