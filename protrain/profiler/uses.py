"""Who uses which parameter: seen where operations take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protrain.common.trees import tensors_in

# Of the parameters that these take as ``inputs`` only the place in the graph is needed.
_PLACES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
_DATA: Any = Tensor.data


class Uses(TorchFunctionMode):
    """Tells ``used`` of every operation that takes a parameter of ``index`` (by id), whoever calls it.

    And calls ``differentiated`` where gradients are computed with a graph of their own.
    """

    def __init__(self, index: dict[int, int], used: Callable[[int], None], differentiated: Callable[[], None]) -> None:
        super().__init__()
        self._index = index
        self._used = used
        self._differentiated = differentiated

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, with the parameters among its arguments filled."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad and kwargs.get("create_graph"):
            self._differentiated()
        found = [self._index[id(tensor)] for tensor in tensors_in((args, kwargs)) if id(tensor) in self._index]
        if not found or func in _PLACES:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__":
            for index in found:
                self._used(index)
            return func(*args, **kwargs)
        # Of .data autograd counts no changes: hand out what shares the parameter's count of them.
        result = args[0].detach() if func == _DATA.__get__ else func(*args, **kwargs)
        if isinstance(result, Tensor):  # weight.T is a use, weight.dtype is none
            for index in found:
                self._used(index)
        return result
