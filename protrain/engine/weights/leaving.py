"""Views of weights in chunk buffers that leave their unit: by when they are used they show another chunk."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from protrain.engine.activations.saved import Copy
from protrain.engine.states.chunks import Member
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.released import ReleasedParameter
from protrain.engine.weights.views import storage_address
from protrain.errors import MisuseError
from protrain.trees import map_leaves, tensors_in

if TYPE_CHECKING:
    from protrain.engine.units import Unit


def out_of_buffers(tree: Any, buffers: BufferPool, *, own: Sequence[Member] = ()) -> Any:
    """``tree`` with copies of the weights in chunk buffers that it hands on: in another unit they would be gone.

    Parameters of ``own``, of the unit that gets them and has bound them by the time it uses them, stay themselves.
    """
    if not buffers.buffers:
        return tree

    def handed_on(leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or isinstance(leaf, ReleasedParameter) or leaf.layout != torch.strided:
            return False
        return buffers.holder(storage_address(leaf)) is not None and not any(leaf is m.parameter for m in own)

    if not any(map(handed_on, tensors_in(tree))):
        return tree
    return map_leaves(lambda leaf: Copy.apply(leaf) if handed_on(leaf) else leaf, tree)


def refuse_kept_views(unit: Unit, buffers: BufferPool) -> None:
    """MisuseError where a view of a weight is kept where the engine cannot see it: in backward it would be another.

    What autograd saves it does see. What it cannot see is a user of the buffer's memory that came while the unit
    had it, and stays when the unit, with all that runs around it, is done.
    """
    if not any(map(buffers.outlived, unit.chunks)):
        return
    gc.collect()  # a cycle may keep what nobody can use any more
    for chunk in filter(buffers.outlived, unit.chunks):
        names = [member.name for member in unit.members if member.chunk is chunk]
        raise MisuseError(
            f"{unit.label} keeps a view of a weight ({', '.join(names)}) beyond its forward, by when that has left "
            "the device: in a torch.autograd.Function it goes through ctx.save_for_backward, not into an attribute "
            "of ctx; elsewhere keep a copy (tensor.clone())"
        )
