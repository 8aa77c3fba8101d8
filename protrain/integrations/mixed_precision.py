"""What bf16 of Accelerate, and so of transformers' Trainer, means beside weights in bf16.

Accelerate runs a model that it prepares under autocast, and returns its outputs in fp32. So models may mix types, such
as a buffer in fp32 with weights in bf16, and losses are computed in fp32. ProTrain keeps Accelerate from the model, so
it does the same here.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager
from torch import nn

from protrain.common.parameters import DTYPES


def precision_of(args: Any) -> str:
    """The mixed precision of the training arguments ``args``: "no", "bf16", "fp16" or what `accelerate launch` says."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def refuse_precision(precision: str, given: str) -> None:
    """ValueError where ProTrain does not have the mixed ``precision``, which the user has ``given`` in these words."""
    if precision not in ("no", "bf16"):
        raise ValueError(f"{given} cannot be used, as ProTrain mixes fp32 with bf16 alone: use bf16")


def mix_precision(accelerator: Any, model: nn.Module, whole: nn.Module) -> None:
    """Run ``model`` as Accelerate runs a model that it prepares.

    Args:
        accelerator: with bf16 as its mixed precision.
        model: what it would prepare.
        whole: what is trained: the model, or a loss around it. A loss computes in fp32, unless it has weights of its
            own, as these become bf16.
    """
    model.forward = convert_outputs_to_fp32(_under_autocast(accelerator, model))
    if whole is not model and set(whole.parameters()) - set(model.parameters()):
        whole.forward = _under_autocast(accelerator, whole)


def cast_reference(reference: nn.Module, model: nn.Module, dtype: torch.dtype) -> None:
    """Give TRL's reference model the weights with which the training of ``model`` begins, rounded to ``dtype``.

    Otherwise the two would differ before the first step, where DPO's loss is log 2.
    """
    if dtype != first_dtype(model) == first_dtype(reference):
        for parameter in reference.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def first_dtype(model: nn.Module) -> torch.dtype:
    """The type of the model's first weight that could be trained."""
    return next((p.dtype for p in model.parameters() if p.dtype in DTYPES.values()), torch.float32)


def _under_autocast(accelerator: Any, module: nn.Module) -> Any:
    forward = module.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The context of accelerator.autocast() is not left after an error in early versions.
        with get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler):
            return forward(*args, **kwargs)

    return run
