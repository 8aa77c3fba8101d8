"""Loops of Accelerate on ProTrain.

    model, optimizer = wrap(accelerator, model, optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Accelerate has no place for backends of others, so ``wrap`` comes first, and ``prepare`` leaves model and optimizer as
they are. What ``prepare`` would have done for the precision of the model is done here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

import protrain.wrapping
from protrain.common.warned import warned_at_user
from protrain.integrations.mixed_precision import first_dtype, mix_precision, refuse_precision
from protrain.optim.optimizer import ProTrainOptimizer

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    accelerator: Accelerator, model: Model, optimizer: torch.optim.Optimizer, **arguments: Any
) -> tuple[Model, ProTrainOptimizer]:
    """``protrain.wrap`` with the device, the accumulation and the precision of ``accelerator``.

    Args:
        accelerator: with ``mixed_precision="bf16"`` the weights become bf16, with fp32 masters, and the model runs
            under autocast and returns fp32. Otherwise weights keep the type of the model's first one.
        model: as it is before ``accelerator.prepare``.
        optimizer: the same.
        arguments: of ``protrain.wrap``, which come before those of ``accelerator``.

    Raises:
        ValueError: another ``mixed_precision``, or what ``protrain.wrap`` refuses.
    """
    precision = accelerator.mixed_precision
    refuse_precision(precision, f'mixed_precision="{precision}"')
    if precision == "bf16":
        mix_precision(accelerator, model, model)
    found = {
        "device": accelerator.device,
        "dtype": torch.bfloat16 if precision == "bf16" else first_dtype(model),
        "accumulation": accelerator.gradient_accumulation_steps,
    }
    with warned_at_user():
        return protrain.wrapping.wrap(model, optimizer, **(found | arguments))
