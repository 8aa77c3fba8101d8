"""Changes the forwards of a model: its blocks are compiled, and its loss is computed piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from protrain.forward.chunked_loss import can_chunk, chunk_loss
from protrain.forward.compilation import compile_blocks
from protrain.profiler.blocks import find_blocks


def change_forwards(
    model: nn.Module, batch: Any, *, compile: bool, chunked_loss: bool | None, on_meta: bool = False
) -> Callable[[], None]:
    """Change ``model`` for training.

    Args:
        model: that is trained.
        batch: of the training. It tells whether the model computes its loss, for which it needs labels.
        compile: the forward of each block.
        chunked_loss: compute the loss piece by piece. None means yes where that is known to be the same loss.
        on_meta: change it only for a trace on the meta device.

    Returns:
        A function that undoes it.

    Raises:
        ValueError: as ``protrain.forward.chunked_loss.chunk_loss``. After any exception, nothing is changed.
    """
    if chunked_loss is None:
        chunked_loss = isinstance(batch, Mapping) and batch.get("labels") is not None and can_chunk(model)
    blocks = [model.get_submodule(path) for path in find_blocks(model)] if compile else []
    changes: ExitStack[None] = ExitStack()
    with changes:
        if chunked_loss:
            changes.callback(chunk_loss(model))
        changes.callback(compile_blocks(blocks, on_meta=on_meta))
        return changes.pop_all().close
