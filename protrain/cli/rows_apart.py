"""Finds out whether a model keeps the rows that are packed into one sequence apart."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from protrain.cli.data import example_batch, stand_in
from protrain.cli.models import LoadedModel
from protrain.forward.compilation import replace_attributes
from protrain.profiler.blocks import find_blocks
from protrain.profiler.meta_device import as_if_on_gpu


class _Stop(Exception):
    """Ends a forward once it is known what it does with positions."""


def what_joins_rows(loaded: LoadedModel, *, sequence: int) -> str | None:
    """Why a token sees other rows of its ``sequence`` tokens, in words that follow "as". None: it does not.

    The parameters of the model are on the meta device. Its forward ends before the first block.
    """
    example = example_batch(stand_in(sequence, rows=True), seed=0, batch=1, sequence=sequence)
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in loaded.arguments(example).items()
    }
    if "position_ids" not in arguments or not _makes_mask(loaded.model, arguments):
        return "it makes no mask of their positions"
    model: Any = loaded.model
    has_convolutions = any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules())
    if has_convolutions or "linear_attention" in (getattr(loaded.config, "layer_types", None) or ()):
        return "its recurrent layers remember those before"
    return None


def _makes_mask(model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether ``model`` asks transformers where rows begin, before its first block runs."""
    asked = False

    def find(_: torch.Tensor) -> NoReturn:
        nonlocal asked
        asked = True
        raise _Stop

    def stop(*_: object) -> NoReturn:
        raise _Stop

    from transformers import masking_utils

    put_back = replace_attributes([(masking_utils, "find_packed_sequence_indices", find)])
    hooks = [model.get_submodule(path).register_forward_pre_hook(stop) for path in find_blocks(model)]
    try:
        with torch.no_grad(), as_if_on_gpu():
            model(**arguments)
    except _Stop:
        pass
    except Exception:  # which the profile meets, too, and names better
        return True
    finally:
        put_back()
        for hook in hooks:
            hook.remove()
    return asked
