"""Loops of Accelerate on ProTrain.

    model, optimizer = wrap(accelerator, model, optimizer)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Accelerate has no place for backends of others, so ``wrap`` comes first, and ``prepare`` leaves model and optimizer as
they are. Accelerate does not list them among what it saves: hooks of ``save_state`` and ``load_state`` give both to
``save_checkpoint`` and ``load_checkpoint``, in a folder beside the files of Accelerate.

[Note: bf16 of Accelerate] Accelerate, and so transformers' Trainer, runs a model that it prepares under autocast, and
returns its outputs in fp32. So models may mix types, such as a buffer in fp32 with weights in bf16, and losses are
computed in fp32. ProTrain keeps Accelerate from the model, so it does the same here.
"""

from __future__ import annotations

import os
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager
from torch import nn

import protrain.wrapping
from protrain.checkpoint.loading import load_checkpoint
from protrain.checkpoint.saving import save_checkpoint
from protrain.common.errors import CheckpointError
from protrain.common.parameters import DTYPES
from protrain.optim.optimizer import ProTrainOptimizer

_COUNT = "_protrain_models"  # the attribute of an accelerator with the number of models that were wrapped for it
_END = "random_states_0.pkl"  # the file that Accelerate writes last, but for those of objects of the user
_LAST = ("random_states_*.pkl", "custom_checkpoint_*.pkl")
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
    wrapped = protrain.wrapping.wrap(model, optimizer, **(found | arguments))
    leave_model(accelerator, model)
    _save_apart(accelerator, *wrapped)
    return wrapped


def leave_model(accelerator: Any, model: nn.Module) -> None:
    """Let ``accelerator`` leave a wrapped ``model`` as it is, whose mark it does not ask for before 1.14."""
    prepare = accelerator.prepare_model

    def prepare_model(given: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model if given is model else prepare(given, *args, **kwargs)

    accelerator.prepare_model = prepare_model


def _save_apart(accelerator: Any, model: nn.Module, optimizer: ProTrainOptimizer) -> None:
    """Let ``save_state`` and ``load_state`` of ``accelerator`` leave model and optimizer to ProTrain.

    A hook of a save runs before Accelerate writes its own files, of which those of ``_LAST`` come last. So they are
    deleted first, and a folder that lacks them was not saved to its end.
    """
    number = vars(accelerator).get(_COUNT, 0)
    name = f"protrain{number or ''}"  # of the folder
    prepare = accelerator.prepare_optimizer

    def prepare_optimizer(given: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(given, *args, **kwargs)
        if given is optimizer:
            accelerator._optimizers.remove(prepared)
        return prepared

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        optimizer.ranks.meet("accelerator.save_state()")
        if accelerator.is_main_process:
            for path in [path for pattern in _LAST for path in Path(folder).glob(pattern)]:
                path.unlink()
        save_checkpoint(Path(folder) / name, model, optimizer, keep=1)

    def load(models: list[Any], folder: str) -> None:
        own = Path(folder) / name
        if own.exists() and not (Path(folder) / _END).exists():
            raise CheckpointError(f"{folder} has no {_END}, so it was not saved to its end: load another checkpoint")
        load_checkpoint(own, model, optimizer)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    vars(accelerator).update({"prepare_optimizer": prepare_optimizer, _COUNT: number + 1})


def precision_of(args: Any) -> str:
    """The mixed precision of the training arguments ``args``: "no", "bf16", "fp16" or what `accelerate launch` says."""
    if args.bf16:
        return "bf16"
    return "fp16" if args.fp16 else os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def refuse_precision(precision: str, given: str) -> None:
    """ValueError where ProTrain does not have the mixed ``precision``, which the user has ``given`` in these words."""
    if precision not in ("no", "bf16"):
        raise ValueError(f"{given} cannot be used, as ProTrain mixes fp32 with bf16 alone: use bf16")


def mix_precision(accelerator: Any, model: nn.Module, whole: nn.Module) -> None:
    """Run ``model`` as Accelerate runs a model that it prepares: see [Note: bf16 of Accelerate].

    Args:
        accelerator: with bf16 as its mixed precision.
        model: what it would prepare.
        whole: what is trained: the model, or a loss around it. A loss computes in fp32, unless it has weights of its
            own, as these become bf16.
    """
    model.forward = convert_outputs_to_fp32(_under_autocast(accelerator, model))
    if whole is not model and set(whole.parameters()) - set(model.parameters()):
        whole.forward = _under_autocast(accelerator, whole)


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
