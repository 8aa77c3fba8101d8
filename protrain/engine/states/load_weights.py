"""Weights from a folder of safetensors into chunks, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from protrain.engine.states.chunks import Member
from protrain.engine.states.weight_files import unmanaged, weight_sources

Write = Callable[[Member, Tensor], None]


def load_weights(members: list[Member], model: nn.Module, folder: Path, write: Write) -> None:
    """Give every member, and every buffer that the files hold, its value from the safetensors of ``folder``.

    Raises:
        ValueError: as :func:`protrain.engine.states.weight_files.weight_sources`, or a file turned unreadable.
    """
    from safetensors import SafetensorError, safe_open

    by_name = {member.name: member for member in members}
    others, sources = unmanaged(model), weight_sources(model, folder)
    by_file: dict[Path, list[tuple[str, Member | Tensor]]] = {}
    for name, (file, key) in sources.parameters.items():
        by_file.setdefault(file, []).append((key, by_name[name]))
    for name, (file, key) in sources.others.items():
        by_file.setdefault(file, []).append((key, others[name]))
    for file, targets in by_file.items():
        try:
            with safe_open(file, framework="pt") as tensors, torch.no_grad():
                for key, target in targets:
                    if isinstance(target, Tensor):
                        target.copy_(tensors.get_tensor(key))
                        continue
                    write(target, tensors.get_tensor(key))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"weights: {file} is no readable safetensors file: {error}") from None
