"""Checks of model and optimizer before anything is profiled or moved: each refusal says why."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from protrain.common.parameters import is_managed

# Classes that spread a model over processes. Names, because importing their libraries takes seconds.
_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """ValueError where ``model`` or ``optimizer`` cannot be trained on ``device`` as they are.

    A warning of parameters that would not be trained.
    """
    for name, module in model.named_modules():
        _check_placement(name, module, device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_kind(name, tensor)
    known = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's: make "
                    "the optimizer from this model's parameters()"
                )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_managed(parameter):
            raise ValueError(_not_trained(name, parameter))
        if parameter.is_inference():
            raise ValueError(f"parameter {name} was made in torch.inference_mode(): build the model outside of that")
        if not parameter.is_meta and parameter.grad is not None:
            raise ValueError(
                f"parameter {name} has a gradient already, which the first step would add to its own: call "
                "optimizer.zero_grad() before protrain.wrap"
            )
    for name, module in model.named_modules():
        what = f"module {name or type(model).__name__!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{what} is a ScriptModule, whose weights cannot be moved: use the module that it was made from, and "
                "compile=True"
            )
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(
                f"{what} is compiled by torch.compile, and would compile the moves of its weights: give protrain.wrap "
                "the module as it was before, and compile=True, which compiles each block"
            )
        parallel = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _PARALLEL), None)
        if parallel is not None:
            raise ValueError(
                f"{what} is a {parallel}, which waits for gradients that never come to it: ProTrain trains on one GPU, "
                "so wrap the module inside it, and train that"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"{what} makes sparse gradients, which AdamW does not take: build it with sparse=False")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(parameter.requires_grad for parameter in model.parameters() if id(parameter) in held):
        raise ValueError("no parameter in the optimizer requires a gradient, so there is nothing to train")
    forgotten = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if forgotten:
        warnings.warn(
            f"{len(forgotten)} parameters require a gradient but are in no optimizer group: they will not change, and "
            f"have no .grad, among them {forgotten[0]}",
            stacklevel=3,  # of the caller of wrap
        )


def _check_kind(name: str, tensor: Tensor) -> None:
    """ValueError where the parameter or buffer ``name`` is of a kind that has no place on the device."""
    what = f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name}"
    if is_lazy(tensor):
        raise ValueError(
            f"{what} has no shape yet, as a lazy module gets its shapes from the first batch: call the model once on a "
            "batch, and make the optimizer after that"
        )
    if any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__):
        raise ValueError(
            f"{what} is a DTensor, which lies on several devices: ProTrain trains on one GPU, so build the model "
            "without a device mesh, or put full_tensor() of it in its place"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{what} is {layout}, which ProTrain cannot place: keep a dense one")


def _not_trained(name: str, parameter: nn.Parameter) -> str:
    """Why ``parameter``, which requires a gradient, cannot be trained, and what to do."""
    freeze = "or set requires_grad=False"
    if parameter.is_complex():
        return (
            f"parameter {name} is {parameter.dtype}, which is not trained: keep real and imaginary parts of it "
            f"(torch.view_as_real), {freeze}"
        )
    if type(parameter) is nn.Parameter:
        return (
            f"parameter {name} is {parameter.dtype}, too coarse for the updates of training: keep it in bfloat16 or "
            f"float32, {freeze}, as adapters beside a quantised weight do"
        )
    return (
        f"parameter {name} is a {type(parameter).__name__}, whose parts are not trained: make it an nn.Parameter of "
        f"an ordinary tensor (dequantised, if it is quantised), {freeze}, as adapters beside a quantised weight do"
    )


def _check_placement(name: str, module: nn.Module, device: torch.device) -> None:
    """ValueError where a hook of accelerate brings weights or inputs of ``module`` elsewhere than to ``device``."""
    hook = getattr(module, "_hf_hook", None)
    hooks = [hook]
    for outer in hooks:  # grows meanwhile
        hooks += getattr(outer, "hooks", ())  # of a SequentialHook
    for each in hooks:
        kinds = {cls.__name__ for cls in type(each).__mro__}
        execution = _device(getattr(each, "execution_device", None))
        if getattr(each, "offload", False) or "CpuOffload" in kinds:
            does = "fetches its weights from elsewhere in each forward"
        elif "LayerwiseCastingHook" in kinds:
            does = "casts its weights in each forward"
        elif execution is not None and not _is_same(execution, device):
            does = f"takes its inputs to {execution}, and training is on {device}"
        else:
            continue
        raise ValueError(
            f"module {name or type(module).__name__!r} has a hook of accelerate ({type(each).__name__}) that {does}: "
            "ProTrain places weights itself, so load the model without device_map, or build it under "
            "protrain.empty_parameters() and pass weights=. Weights that were in memory before come back by "
            "accelerate.hooks.remove_hook_from_submodules(model), before the optimizer is made"
        )


def _device(named: Any) -> torch.device | None:
    """The device that accelerate's name for it means: a number is that of a GPU."""
    return None if named is None else torch.device(f"cuda:{named}" if isinstance(named, int) else named)


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Whether both name one device; one without an index is the current of its type."""
    return one.type == other.type and (None in (one.index, other.index) or one.index == other.index)
