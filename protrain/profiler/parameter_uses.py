"""Finds which unit uses which parameter, by watching the operations that take parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protrain.common.trees import tensors_in

# These need only the place of a parameter in the graph, not its values.
_PLACES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
# Attributes that are tensors made of the values. All others, such as the shape, describe the parameter.
_VALUES = frozenset([getattr(Tensor, name).__get__ for name in ("data", "T", "H", "mT", "mH", "real", "imag")])
_DATA: Any = Tensor.data


class Uses(TorchFunctionMode):
    """Calls ``used`` for every parameter in ``index`` (by id) that an operation takes, whoever calls the operation.

    It also calls ``differentiated`` when gradients are computed with ``create_graph=True``.
    """

    def __init__(self, index: dict[int, int], used: Callable[[int], None], differentiated: Callable[[], None]) -> None:
        super().__init__()
        self._index = index
        self._used = used
        self._differentiated = differentiated

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` after its parameters are filled."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad and kwargs.get("create_graph"):
            self._differentiated()
        found = [self._index[id(tensor)] for tensor in tensors_in((args, kwargs)) if id(tensor) in self._index]
        if not found or func in _PLACES:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__" or func in _VALUES:
            for index in found:
                self._used(index)
        # Autograd counts no in-place changes of .data. A detached tensor shares the parameter's count of them.
        return args[0].detach() if func == _DATA.__get__ else func(*args, **kwargs)
