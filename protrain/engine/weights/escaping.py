"""Views of weights that leave the unit that made them: when they are used the chunk may lie elsewhere.

They are copied. Views of resident weights are treated like all others, so that what a script may do does not depend on
the plan.

[Note: gradients of copies] A view that several units are given has the gradient of the plain loop only if all of its
uses are added up in the plain loop's order. A copy that is a node of the graph would first add up those of one unit. So
the copy has the place of the original in the graph: autograd gives it to whatever the hook for saved tensors returns.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from protrain.common.errors import MisuseError
from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.activations.saved import own_copy
from protrain.engine.units import Unit
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.released import ReleasedParameter
from protrain.engine.weights.views import storage_address


def copy_escaping_weights(tree: Any, buffers: BufferPool, *, own: Unit | None = None) -> Any:
    """``tree`` with copies in place of the views of weights that it passes from one unit to another.

    Args:
        tree: the arguments or the output of a unit.
        buffers: where weights lie.
        own: the unit that gets ``tree``. Its own parameters are not copied, as they are on the device while it runs.
    """
    storages = buffers.by_address

    def escapes(leaf: Any) -> bool:
        if type(leaf) is Tensor:
            return storage_address(leaf) in storages
        if not isinstance(leaf, Tensor) or isinstance(leaf, ReleasedParameter) or storage_address(leaf) not in storages:
            return False
        return own is None or not any(leaf is member.parameter for member in own.members)

    for tensor in tensors_in(tree):  # every call of every unit runs this loop, and hardly any finds something
        if escapes(tensor):
            return map_leaves(lambda leaf: _copied(leaf) if escapes(leaf) else leaf, tree)
    return tree


class _Saving(torch.autograd.Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.new_empty(())


def _copied(tensor: Tensor) -> Tensor:
    """A copy whose gradient is added to that of ``tensor``: [Note: gradients of copies]."""
    copy = own_copy(tensor)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return copy
    with saved_tensors_hooks(lambda _: None, lambda _: copy):
        output = _Saving.apply(tensor)
    # read while the output is there: torch 2.11 frees with it what its node has saved
    found: Tensor = output.grad_fn.saved_tensors[0]
    return found


def refuse_leaked_views(unit: Unit, buffers: BufferPool) -> None:
    """MisuseError where the forward of ``unit`` has left a view of a weight that the engine does not know of.

    The engine knows the views that autograd saves. Any other view would show another chunk's weight in backward. It is
    found by counting: the memory of the chunk has more users after the unit than before it.
    """
    if not any(map(buffers.has_leaked_view, unit.chunks)):
        return
    gc.collect()  # an unreachable cycle may hold the view
    for chunk in filter(buffers.has_leaked_view, unit.chunks):
        names = [member.name for member in unit.members if member.chunk is chunk]
        raise MisuseError(
            f"{unit.label} keeps a view of a weight ({', '.join(names)}) after its forward, when the weight may have "
            "left the device: in a torch.autograd.Function use ctx.save_for_backward and no attribute of ctx, and "
            "elsewhere keep a copy (tensor.clone())"
        )
