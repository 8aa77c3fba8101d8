"""Views of weights that leave their unit: by when they are used the chunk may be elsewhere.

A script may do the same wherever a chunk lies, so views of persistent chunks are treated as the others.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.activations.saved import Copy
from protrain.engine.states.chunks import Chunk
from protrain.engine.units import Unit
from protrain.engine.weights.buffers import Buffer, BufferPool
from protrain.engine.weights.released import ReleasedParameter
from protrain.engine.weights.views import storage_address


def copies_of_weights(tree: Any, places: Mapping[int, Chunk | Buffer], *, own: Unit | None = None) -> Any:
    """``tree`` with copies of the weights that it hands on: in another unit they would be gone.

    Parameters of ``own``, the unit that gets them and has bound them by the time it uses them, stay themselves.
    """

    def handed_on(leaf: Any) -> bool:
        if type(leaf) is Tensor:
            return storage_address(leaf) in places
        if not isinstance(leaf, Tensor) or isinstance(leaf, ReleasedParameter) or storage_address(leaf) not in places:
            return False
        return own is None or not any(leaf is member.parameter for member in (*own.members, *own.residents))

    for tensor in tensors_in(tree):  # a loop, as it is walked in every call of every unit, nearly always in vain
        if handed_on(tensor):
            return map_leaves(lambda leaf: Copy.apply(leaf) if handed_on(leaf) else leaf, tree)
    return tree


def refuse_kept_views(unit: Unit, buffers: BufferPool) -> None:
    """MisuseError where a view of a weight is kept where the engine cannot see it: in backward it would be another.

    What autograd saves it does see. What it cannot see is a user of the chunk's memory that came while the unit had
    it, and stays when the unit, with all that runs around it, is done.
    """

    def outlived(chunk: Chunk) -> bool:
        if chunk.persistent:
            return chunk.holders == 0 and chunk.viewers.are_more()
        return buffers.outlived(chunk)

    chunks = (*unit.chunks, *unit.resident_chunks)
    if not any(map(outlived, chunks)):
        return
    gc.collect()  # a cycle may keep what nobody can use any more
    for chunk in filter(outlived, chunks):
        names = [member.name for member in (*unit.members, *unit.residents) if member.chunk is chunk]
        raise MisuseError(
            f"{unit.label} keeps a view of a weight ({', '.join(names)}) beyond its forward, by when that may have "
            "left the device: in a torch.autograd.Function it goes through ctx.save_for_backward, not into an "
            "attribute of ctx; elsewhere keep a copy (tensor.clone())"
        )
