"""Outputs of attention that are kept while the rest of a block is recomputed.

[Note: what is not computed twice] Attention takes a share of a block's forward that grows with the sequence, and leaves
one tensor of the size of the block's input and a few small ones. Kept, they stand in for the operator when the block
runs again, so that autograd builds the same graph around them. A dispatch mode sees the operators below autograd,
whoever calls them; a compiled forward calls attention as such an operator too, and little else.

Only outputs that have a backward of their own are kept: nothing may write over those, whereas others may be updated in
place. Whatever the operator drew at random stays drawn, as the generator is set to where it stood behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from protrain.attention import for_backward, is_attention
from protrain.engine.random_state import RandomState


@dataclass(slots=True)
class _Call:
    """One call of an attention operator in the first run."""

    operator: Any
    shapes: tuple[torch.Size, ...]
    outputs: Any
    after: RandomState
    kept: bool = False


class KeptAttention:
    """The attention of one call of a block, from its forward to its last recomputation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[_Call] = []

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, the block's first run, with its attention noted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _Noting(self._calls, self._device):
                return function(*args, **kwargs)

        return run

    def keep(self, saved: set[int]) -> list[Tensor]:
        """Keep the calls that have a backward, by the storages ``saved`` by autograd. Returns the tensors kept."""
        for call in self._calls:
            call.kept = for_backward(call.outputs).untyped_storage().data_ptr() in saved
            if not call.kept:
                call.outputs = ()
        return [tensor for call in self._calls for tensor in _tensors_in(call.outputs)]

    def replace(self, function: Callable[[Any], Any]) -> None:
        """Have ``function`` of each kept tensor in its place."""
        for call in self._calls:
            call.outputs = tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, call.outputs)

    def again(self, restored: Callable[[Any], Any]) -> TorchDispatchMode:
        """A mode for another run, with ``restored`` of what is kept in place of what attention would compute."""
        return _Again(iter(self._calls), restored)


class _Noting(TorchDispatchMode):
    def __init__(self, calls: list[_Call], device: torch.device) -> None:
        super().__init__()
        self._calls = calls
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled forward is compiled as it would be without, and seen when it runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, and note it when it is attention."""
        result = func(*args, **(kwargs or {}))
        if is_attention(func):
            # Detached, or what autograd makes of the result would hold the graph that it is part of.
            outputs = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
            self._calls.append(_Call(func, _shapes(args, kwargs), outputs, RandomState(self._device)))
        return result


class _Again(TorchDispatchMode):
    def __init__(self, calls: Iterator[_Call], restored: Callable[[Any], Any]) -> None:
        super().__init__()
        self._calls = calls
        self._restored = restored

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As in the first run."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What is kept of ``func``; run it where nothing is, or where this is not the call that it was kept of."""
        if is_attention(func):
            call = next(self._calls, None)
            if call is not None and call.kept and (func, _shapes(args, kwargs)) == (call.operator, call.shapes):
                call.after.set()
                return tree_map(self._restored, call.outputs)
        return func(*args, **(kwargs or {}))


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _shapes(args: Any, kwargs: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in _tensors_in((args, kwargs)))
