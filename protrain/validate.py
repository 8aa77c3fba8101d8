"""What is refused before anything is profiled or moved, and why."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from protrain.parameters import is_managed

# Classes that spread a model over processes. Names, because importing their libraries takes seconds.
_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """ValueError where ``model`` or ``optimizer`` cannot be trained as they are; a warning of what trains nothing."""
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
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, which is not trained: keep real and imaginary parts of it "
                "(torch.view_as_real), or set requires_grad=False"
            )
        if parameter.is_inference():
            raise ValueError(f"parameter {name} was made in torch.inference_mode(): build the model outside of that")
        if not parameter.is_meta and parameter.grad is not None:
            raise ValueError(
                f"parameter {name} has a gradient already, which the first step would add to its own: call "
                "optimizer.zero_grad() before protrain.wrap"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(f"buffer {name} is {buffer.layout}, which ProTrain cannot place: keep a dense one")
    for name, module in model.named_modules():
        what = f"module {name or type(model).__name__!r}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{what} is a ScriptModule, whose weights cannot be moved: use the module that it was made from, and "
                "compile=True"
            )
        parallel = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _PARALLEL), None)
        if parallel is not None:
            raise ValueError(
                f"{what} is a {parallel}, which waits for gradients that never come to it: ProTrain trains on one GPU, "
                "so wrap the module inside, before or in place of that"
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
