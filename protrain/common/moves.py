"""Refuses to move a model, or a part of it, to another device or type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError


def refuse_moves(model: nn.Module, sample: Tensor) -> None:
    """Refuse what ``to``, ``half``, ``cuda``, ``share_memory`` and the like of ``model`` and its modules would do.

    A parameter that they replaced would leave its chunk. What leaves ``sample``, which has the device and the type of
    the parameters, where and as it is, does nothing.
    """
    for module in model.modules():
        vars(module)["_apply"] = partial(_refuse, module, sample)


def _refuse(module: nn.Module, sample: Tensor, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    moved = function(sample.clone())
    if (moved.dtype, moved.device) == (sample.dtype, sample.device):
        if moved.is_shared() and not sample.is_shared():  # torch calls all memory of a GPU shared
            raise MisuseError(
                "a wrapped model cannot share its memory with other processes, as its weights move in every step: "
                "give them model.state_dict()"
            )
        return module
    message = (
        f"a wrapped model cannot be moved from {sample.device} in {sample.dtype} to {moved.device} in {moved.dtype}: "
        "pass device= and dtype= to protrain.wrap"
    )
    if moved.device == sample.device and moved.dtype == torch.float32:
        message += (
            ". Where the forward of the model itself converts a module, such as the router of a mixture of experts, "
            f"build the model without it (config.router_dtype = {str(sample.dtype).removeprefix('torch.')!r} of Switch "
            "Transformers and NLLB-MoE), or pass dtype='float32'"
        )
    raise MisuseError(message)
