"""Outputs of attention that are kept while the rest of a block is recomputed.

[Note: what is not computed twice] The share of a block's forward that attention takes grows with the sequence. Its
outputs are one tensor of the size of the block's input and a few small ones. They are kept, and replace the operator
when the block runs again, so that autograd builds the same graph around them. A dispatch mode sees the operators below
autograd, whoever calls them. A compiled forward calls attention as such an operator, too.

Outputs are kept only if attention's own backward will use them, which shows in autograd saving them. Code may write
over a saved tensor if no backward needs it, so the versions of outputs are checked, as autograd checks those of saved
tensors. (Writes through ``.data`` have no version, and autograd does not see them either.) The random generator is set
to its state after the operator, so that later operators draw the same numbers as in the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protrain.common.trees import tensors_in
from protrain.engine.weights.views import storage_address
from protrain.forward.dispatch import RuntimeMode, detached, for_backward, is_attention
from protrain.forward.module_state import RandomState


@dataclass(slots=True)
class _Call:
    """One call of an attention operator in the first run. If it has no outputs the second run computes them again."""

    operator: Any
    shapes: list[torch.Size]  # of the tensors that it was given
    outputs: tuple[Any, ...]
    after: RandomState
    saved: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # outputs that autograd saves, with versions
    moved: bool = False  # the outputs were offloaded, so that nothing can write over them

    def check(self) -> None:
        """Drop the outputs if attention has no backward, or if something has written over them."""
        sums = for_backward(self.outputs)
        whole = sums is not None and {storage_address(sums), storage_address(self.outputs[0])} <= self.saved.keys()
        if not whole or any(tensor._version != version for tensor, version in self.saved.values()):
            self.give_up()

    def give_up(self) -> None:
        """Drop the outputs."""
        self.outputs = ()
        self.saved.clear()


class KeptAttention:
    """The attention of one call of a block, from its forward to its recomputation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[_Call] = []
        self._with_output: dict[int, _Call] = {}  # by the address of an output, which is unique while that is alive

    def first_run(self) -> RuntimeMode:
        """A mode for the first run, in which the calls of attention are recorded."""
        return _InPlaceOfAttention(self._record)

    def _record(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        # Outputs without gradients are not worth keeping, but a compiled forward runs with gradients disabled.
        keeps = not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        # Detached, as autograd turns the result into an output that refers to its own graph.
        outputs = _with_tensors(detached, result) if keeps and isinstance(result, tuple) else ()
        call = _Call(operator, _shapes(args, kwargs), outputs, RandomState(self._device))
        self._calls.append(call)
        self._with_output.update({at: call for at in map(storage_address, tensors_in(outputs)) if at})
        return result

    def record_saved(self, tensor: Tensor) -> None:
        """Record ``tensor``, which autograd saves in the first run, before other code may write over an output."""
        if self._with_output:
            address = storage_address(tensor)
            call = self._with_output.get(address)
            if call is not None and address not in call.saved:
                call.saved[address] = detached(tensor), tensor._version

    def keep(self) -> list[Tensor]:
        """End the first run. Returns the tensors that are kept."""
        for call in self._calls:
            call.check()
        return [tensor for call in self._calls for tensor in tensors_in(call.outputs)]

    def move(self, function: Callable[[Tensor], Any]) -> None:
        """Replace each kept tensor by ``function`` of it."""
        for call in self._calls:
            call.check()
            call.saved.clear()
            call.moved = bool(call.outputs)
            call.outputs = _with_tensors(function, call.outputs)

    def second_run(self, restored: Callable[[Any], Any]) -> RuntimeMode:
        """A mode for the second run, in which ``restored`` of the kept outputs replaces the calls of attention.

        A call runs again if it has no kept outputs, or if they belong to a different call.
        """
        calls = iter(self._calls)

        def second_run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = next(calls, None)
            if call is not None and (operator, _shapes(args, kwargs)) == (call.operator, call.shapes):
                if not call.moved:
                    call.check()
                if outputs := call.outputs:
                    call.after.set()
                    if not call.moved:  # autograd frees them after use, so a further backward computes them again
                        call.give_up()
                    return tuple(map(restored, outputs))
            return operator(*args, **kwargs)

        return _InPlaceOfAttention(second_run)


class _InPlaceOfAttention(RuntimeMode):
    """Calls ``run`` with the operator and its arguments in place of every attention."""

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or what stands for it."""
        if is_attention(func):
            return self._run(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def _with_tensors(function: Callable[[Tensor], Any], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """``outputs`` with ``function`` of each tensor in its place."""
    return tuple([function(value) if isinstance(value, Tensor) else value for value in outputs])


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in((args, kwargs))]
