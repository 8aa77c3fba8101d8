"""Changes the forwards of a model: its blocks are compiled, and its loss is computed piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from protrain.forward.chunked_loss import chunk_loss
from protrain.forward.compilation import compile_blocks
from protrain.profiler.blocks import find_blocks


def change_forwards(
    model: nn.Module, device: torch.device, *, compile: bool, chunked_loss: bool, on_meta: bool = False
) -> Callable[[], None]:
    """Change ``model`` for training on ``device``, or with ``on_meta`` only for a trace on the meta device.

    Returns:
        A function that undoes it.

    Raises:
        ValueError: as ``protrain.forward.chunked_loss.find_head``. After any exception, nothing is changed.
    """
    blocks = [model.get_submodule(path) for path in find_blocks(model)] if compile else []
    changes: ExitStack[None] = ExitStack()
    with changes:
        if chunked_loss:
            changes.callback(chunk_loss(model))
        changes.callback(compile_blocks(blocks, on_meta=on_meta))
        return changes.pop_all().close
