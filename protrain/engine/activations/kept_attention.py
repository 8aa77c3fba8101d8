"""Outputs of attention that are kept while the rest of a block is recomputed.

[Note: what is not computed twice] Attention takes a share of a block's forward that grows with the sequence, and leaves
one tensor of the size of the block's input and a few small ones. Kept, they stand in for the operator when the block
runs again, so that autograd builds the same graph around them. A dispatch mode sees the operators below autograd,
whoever calls them; a compiled forward calls attention as such an operator too, and little else.

Only what attention's own backward will use is kept: autograd saves it, the sums of exponentials for nothing else. Saved
tensors may still be written over where no backward ever goes, so their versions are watched, as autograd watches those
that have no hooks. (Writes through ``.data`` have no version; autograd doesn't see them either.) Whatever the operator
drew at random stays drawn, as the generator is set to where it stood behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.activations.rng import RandomState
from protrain.forward.attention import for_backward, is_attention
from protrain.forward.dispatch import RuntimeMode


@dataclass(slots=True)
class _Call:
    """One call of an attention operator in the first run; without outputs it is computed again."""

    operator: Any
    shapes: tuple[torch.Size, ...]
    outputs: Any
    addresses: frozenset[int]  # of the outputs, for as long as they are held
    after: RandomState
    saved: dict[int, tuple[Tensor, int]] = field(default_factory=dict)  # by address, with its version then
    moved: bool = False  # to where nothing writes over it

    def note_saved(self, tensor: Tensor, address: int) -> None:
        """Autograd saves ``tensor``. The operator's own saves come first, before anything could write."""
        if address in self.addresses and address not in self.saved:
            self.saved[address] = tensor.detach(), tensor._version

    def check(self) -> None:
        """Give up the outputs where attention has no backward, or something has written over them."""
        sums = for_backward(self.outputs)
        whole = sums is not None and {_address(sums), _address(self.outputs[0])} <= self.saved.keys()
        if not whole or any(tensor._version != version for tensor, version in self.saved.values()):
            self.give_up()

    def give_up(self) -> None:
        """Keep nothing."""
        self.outputs = ()
        self.saved.clear()


class KeptAttention:
    """The attention of one call of a block, from its forward to its recomputation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[_Call] = []

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, the block's first run, with its attention noted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _Noting(self._calls, self._device):
                return function(*args, **kwargs)

        return run

    def note_saved(self, tensor: Tensor) -> None:
        """Autograd saves ``tensor`` in the first run. What was noted is alive, so addresses tell storages apart."""
        address = _address(tensor)
        for call in self._calls:
            call.note_saved(tensor, address)

    def keep(self) -> list[Tensor]:
        """The first run is over. Returns the tensors that are kept."""
        for call in self._calls:
            call.check()
        return [tensor for call in self._calls for tensor in tensors_in(call.outputs)]

    def move(self, function: Callable[[Tensor], Any]) -> None:
        """Have ``function`` of each kept tensor in its place."""
        for call in self._calls:
            call.check()
            call.saved.clear()
            call.moved = bool(call.outputs)
            call.outputs = map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, call.outputs)

    def again(self, restored: Callable[[Any], Any]) -> RuntimeMode:
        """A mode for another run, with ``restored`` of what is kept in place of what attention would compute."""
        return _Again(iter(self._calls), restored)


class _Noting(RuntimeMode):
    def __init__(self, calls: list[_Call], device: torch.device) -> None:
        super().__init__()
        self._calls = calls
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, and note it when it is attention."""
        result = func(*args, **(kwargs or {}))
        if is_attention(func):
            # Without gradients nothing is worth holding; a compiled forward runs so, whatever its graph is part of.
            held = not torch.is_grad_enabled() or any(leaf.requires_grad for leaf in tensors_in((args, kwargs)))
            # Detached, or what autograd makes of the result would hold the graph that it is part of.
            outputs = map_leaves(_detached, result) if held else ()
            addresses = frozenset(map(_address, tensors_in(outputs)))
            self._calls.append(_Call(func, _shapes(args, kwargs), outputs, addresses, RandomState(self._device)))
        return result


class _Again(RuntimeMode):
    def __init__(self, calls: Iterator[_Call], restored: Callable[[Any], Any]) -> None:
        super().__init__()
        self._calls = calls
        self._restored = restored

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What is kept of ``func``; run it where nothing is, or where this is not the call that it was kept of."""
        if is_attention(func):
            call = next(self._calls, None)
            if call is not None and (func, _shapes(args, kwargs)) == (call.operator, call.shapes):
                if not call.moved:
                    call.check()
                if outputs := call.outputs:
                    call.after.set()
                    if not call.moved:  # autograd frees what it has used; another backward computes it again
                        call.give_up()
                    return map_leaves(self._restored, outputs)
        return func(*args, **(kwargs or {}))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _shapes(args: Any, kwargs: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors_in((args, kwargs)))
