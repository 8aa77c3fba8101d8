"""What ranks do to write their model as a Hugging Face folder, and to bring it whole to rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import protrain
import protrain.checkpoint.export as exporting
from tests.distributed.test_bits import SPECS, batches, make
from tests.engine.harness import adamw, wrap_under

FILE_BYTES = 20_000  # so that the small model makes several files


def _trained(rank: int, size: int) -> tuple[Any, Any]:
    model = make("llama")
    own = batches(2 * size)[rank::size]
    model, optimizer = wrap_under(
        SPECS[2],
        model,
        adamw(model),
        own[0],
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        world_size=size,
        gradient_reduction="sum",
    )
    for batch in own:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def export_and_save(rank: int, size: int, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """Train, export the model, fail to export it again, and save a checkpoint. Returns the weights and the errors."""
    model, optimizer = _trained(rank, size)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "FILE_BYTES", 4 * FILE_BYTES)
        protrain.export(model, Path(folder, "exported"))
        for target in ("exported", "file/below"):
            try:
                protrain.export(model, Path(folder, target))
            except (OSError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    protrain.save_checkpoint(Path(folder, "checkpoints"), model, optimizer)
    return dict(model.state_dict()), errors


def bring_to_first(rank: int, size: int) -> tuple[Any, Any, Any, Any]:
    """The full states of model and optimizer, and what ``state_dict`` gives."""
    model, optimizer = _trained(rank, size)
    found = protrain.full_state_dict(model), optimizer.full_state_dict()
    dist.barrier()
    return *found, model.state_dict(), optimizer.state_dict()
