"""Finds out whether a model keeps examples that are packed into one sequence apart."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import nn

from protrain.forward.compilation import replace_attributes
from protrain.profiler.blocks import find_blocks
from protrain.profiler.meta_device import as_if_on_gpu


class _Stop(Exception):
    """Ends a forward once it is known what it does with positions."""


def what_joins_rows(model: Any) -> str | None:
    """Why a token of ``model`` sees other examples of its sequence, in words that follow "as". None: it does not.

    The parameters of the model are on the meta device. Its forward ends before the first block.
    """
    taken = inspect.signature(type(model).forward).parameters
    if not {"position_ids", "use_cache"} <= taken.keys() or not _makes_mask(model):
        return "it makes no mask of their positions"
    has_convolutions = any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules())
    if has_convolutions or "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        return "its recurrent layers remember those before"
    return None


def _makes_mask(model: Any) -> bool:
    """Whether ``model`` asks transformers where examples begin, before its first block runs."""
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
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), as_if_on_gpu():
            model(input_ids=ids, position_ids=torch.arange(4, device="meta").repeat(2)[None], use_cache=False)
    except _Stop:
        pass
    except Exception:  # which the profile meets, too, and names better
        return True
    finally:
        put_back()
        for hook in hooks:
            hook.remove()
    return asked
