"""Finds the weights that the model uses outside the calls of the blocks that own them, so that the trace fills them.

``Uses`` watches the operations that take parameters, and so finds which unit uses which parameter.

``InnerBackwards`` fills the weights for a backward that the model runs inside its own forward (torch.autograd.grad).
Such a backward belongs to the segment that it runs in. The weights of a block are on the device while the inner
backward goes through that block. With ``create_graph=True`` the graph of the gradients holds the weights until the
backward of the step. Then they stay filled and count as activations, because the engine copies weights that lie in
chunk buffers (``protrain.engine.activations.saved.Frame.tensor_of``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from protrain.common.trees import tensors_in
from protrain.profiler.stand_in_weights import StandInWeights

# Functions that need only the place of a parameter in the graph, not its values.
_PLACES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
# Attributes that are tensors made of the values. All others, such as the shape, describe the parameter.
_VALUES = frozenset([getattr(Tensor, name).__get__ for name in ("data", "T", "H", "mT", "mH", "real", "imag")])
_DATA: Any = Tensor.data


class Uses(TorchFunctionMode):
    """Calls ``used`` for every parameter in ``index`` (by id) that an operation takes, whoever calls the operation.

    ``Uses`` also calls ``differentiated`` when gradients are computed with ``create_graph=True``.
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


class InnerBackwards:
    """Fills the weights of blocks that an inner backward goes through, and empties them afterwards.

    Args:
        blocks: for each block, the indexes of its parameters.
        outer: indexes of the parameters of other units, which stay filled throughout.
        weights: the stand-ins of all parameters.
    """

    def __init__(self, blocks: Mapping[str, Sequence[int]], outer: Set[int], weights: StandInWeights) -> None:
        self.filled_block: str | None = None  # the block whose weights are filled for an inner backward
        self._blocks = blocks
        self._outer = outer
        self._weights = weights

    def reached(self, unit: str, active: Iterable[str], *, lasting: bool) -> None:
        """Fill the weights of ``unit`` for an inner backward. Its forward is over; its graph keeps them if ``lasting``.

        Raises:
            ValueError: one of the units ``active`` is a block, whose recomputation would not have that graph.
        """
        if unit not in self._blocks:
            return
        calling = next((path for path in active if path in self._blocks), None)
        if calling is not None:
            raise ValueError(
                f"the forward of {calling} computes gradients through {unit}, which does not work where the block is "
                "recomputed: call torch.autograd.grad in the module that calls the blocks, or only for what the block "
                "itself computes"
            )
        if lasting:
            self._weights.hold({*self._blocks[unit], *self._outer})
        else:
            if unit != self.filled_block:
                self.empty_block()
            self.filled_block = unit
            self._weights.fill(self._blocks[unit])

    def empty_block(self) -> None:
        """Empty the weights that the last inner backward filled."""
        if self.filled_block is not None:
            self._weights.empty(self._blocks[self.filled_block])
            self.filled_block = None
