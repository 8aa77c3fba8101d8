"""Loads weights from a folder of safetensors into chunks, at most those that are converted together at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from protrain.engine.states.chunks import Member
from protrain.engine.states.stored_tensors import reading
from protrain.engine.states.weight_files import unmanaged, weight_sources

Write = Callable[[Member, Tensor], None]


def load_weights(members: list[Member], model: nn.Module, folder: Path, write: Write) -> list[Member]:
    """Give every member, and every buffer that the files hold, its value from the safetensors of ``folder``.

    Returns:
        The members that got no value, because the model says that files may lack them.

    Raises:
        ValueError: as :func:`protrain.engine.states.weight_files.weight_sources`, or a file cannot be read any more.
    """
    by_name = {member.name: member for member in members}
    others, found = unmanaged(model), weight_sources(model, folder)
    stored = [tensor for source in found.sources for tensor in source.stored]
    with reading(stored) as read, torch.no_grad():
        for source in found.sources:
            values = source.values(read)
            for name in source.names:
                if name in by_name:
                    write(by_name.pop(name), values[name])
                else:
                    others[name].copy_(values[name])
    return list(by_name.values())
