"""What ``protrain.wrap`` refuses, and why: arguments, model and optimizer are checked before anything is changed.

The optimizer that it was given is refused afterwards, as it would do nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from protrain.common import batch as batches
from protrain.common.dtypes import MOMENT_DTYPES, default_dtype
from protrain.common.errors import MisuseError, warn_user
from protrain.common.parameters import DTYPES, is_managed, split_up
from protrain.distributed.devices import has_bf16, own_device
from protrain.engine.states.empty import check_start_values
from protrain.engine.states.groups import check_options
from protrain.engine.states.weight_files import WeightSources, check_weights
from protrain.engine.weights.parameter import PresentParameter, has_moved
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Plan
from protrain.profiler.blocks import refuse_scripted
from protrain.profiler.operations import storage_key

# Classes that spread a model over processes. They are compared by name, as importing their libraries takes seconds.
_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train: arguments of ``protrain.wrap``, which says what they mean, each in one form."""

    device: torch.device
    dtype: torch.dtype
    moment_dtype: str
    plan: Plan | None
    device_memory: int | str | None
    host_memory: int | str | None
    weights: WeightSources | None
    step_during_backward: bool
    accumulation: int
    compile: bool
    chunked_loss: bool | None
    gradient_reduction: str

    def same_on_all_ranks(self) -> list[str]:
        """What must be the same on all ranks, as text."""
        own = ("device", "plan", "device_memory", "host_memory", "weights")
        same = [f"{name}={value}" for name, value in vars(self).items() if name not in own]
        return [f"device={self.device.type}", *same]


def check_arguments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example_batch: Any,
    *,
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
    plan: Plan | str | os.PathLike[str] | None,
    weights: str | None,
    step_during_backward: bool,
    accumulation: int,
    moment_dtype: torch.dtype | str,
    gradient_reduction: str,
    **others: Any,
) -> TrainingOptions:
    """Raise a ValueError for whatever ``protrain.wrap`` cannot do, and read the plan. Nothing is changed.

    It comes before the profile, which takes minutes for a large model on a CPU.
    """
    wrapped = next((name for name, p in model.named_parameters() if isinstance(p, PresentParameter)), None)
    if wrapped is not None:
        raise ValueError(
            f"{wrapped} belongs to a wrapped model already: use the model and optimizer that protrain.wrap returned, "
            "or, for another training, a model that is made anew and loads what this one has saved. Models that share "
            "parameters are wrapped as one module that holds them all"
        )
    moved = [name for name, parameter in model.named_parameters() if has_moved(parameter)]
    if moved and weights is None:
        raise ValueError(
            f"the weights of this model are gone, {moved[0]} among them: an earlier protrain.wrap failed after it had "
            "moved them. Build the model again, or pass weights="
        )
    _check_supported(optimizer)
    if example_batch is not None:
        batches.check(example_batch)
    target = own_device(device)
    kind = choose_dtype(dtype, target)
    if kind is torch.bfloat16 and not has_bf16(target):
        warn_user(
            f"{torch.cuda.get_device_name(target)} has no units for bfloat16, which torch emulates slowly: pass "
            "dtype='float16', and call optimizer.backward(loss) in place of loss.backward()"
        )
    if step_during_backward and kind is torch.float16:
        raise ValueError(
            "step_during_backward=True does not work with float16, whose steps may be skipped: use bfloat16"
        )
    moments = next((name for name in MOMENT_DTYPES if moment_dtype in (name, DTYPES[name])), None)
    if moments is None:
        raise ValueError(f"moment_dtype must be float32 or bfloat16, not {moment_dtype!r}")
    if not isinstance(accumulation, int) or accumulation < 1:
        raise ValueError(f"accumulation must be 1 or more, the backward() calls of a step, not {accumulation!r}")
    if gradient_reduction not in ("mean", "sum"):
        raise ValueError(f"gradient_reduction must be mean or sum, not {gradient_reduction!r}")
    _check_model(model, optimizer)
    check_start_values(model, loaded=weights is not None)
    return TrainingOptions(
        device=target,
        dtype=kind,
        moment_dtype=moments,
        plan=plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
        # The path is absolute, whatever the folder is at the first call.
        weights=None if weights is None else check_weights(model, Path(os.path.abspath(weights))),
        step_during_backward=step_during_backward,
        accumulation=accumulation,
        gradient_reduction=gradient_reduction,
        **others,
    )


def _check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError unless ``optimizer`` is a plain torch Adam or AdamW."""
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(
            f"optimizer must be torch.optim.AdamW or torch.optim.Adam, not {kind.__name__} of {kind.__module__}: "
            "ProTrain carries out the update itself and supports these two. Wrap first, and give what protrain.wrap "
            "returns to whatever prepares model and optimizer (accelerator.prepare)"
        )
    check_options(optimizer.param_groups)


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError if ``model`` or ``optimizer`` cannot be trained as they are.

    Parameters that would not be trained are warned of.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_kind(name, tensor)
    refuse_scripted(model)
    for name, module in model.named_modules():
        what = f"module {name or type(model).__name__!r}"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(
                f"{what} is compiled by torch.compile, which would also compile the code that moves its weights: give "
                "protrain.wrap the module as it was before, and compile=True, which compiles each block"
            )
        parallel = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _PARALLEL), None)
        if parallel is not None:
            raise ValueError(
                f"{what} is a {parallel}, which would wait for gradients that it never gets: wrap the module inside "
                "it, which ProTrain trains on all processes itself, without replicas of shards (HSDP)"
            )
        hook = getattr(module, "_hf_hook", None)
        for each in (hook, *getattr(hook, "hooks", ())):  # a SequentialHook has several
            if getattr(each, "offload", False):
                raise ValueError(
                    f"{what} has a hook of accelerate ({type(each).__name__}) that "
                    "fetches its weights from elsewhere in each forward: ProTrain places weights itself, so load the "
                    "model without device_map, or build it under protrain.empty_parameters() and pass weights=. "
                    "Weights that were in memory before come back by "
                    "accelerate.hooks.remove_hook_from_submodules(model), before the optimizer is made"
                )
    known = set(model.parameters())
    held = dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])
    others = [tuple(parameter.shape) for parameter in held if parameter not in known]
    if others:
        raise ValueError(
            f"the optimizer holds a parameter of shape {others[0]} that is not the model's: make the optimizer from "
            "this model's parameters(), or, if it trains several models, wrap one module that holds them all"
        )
    _refuse_shared_memory(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_managed(parameter):
            kind = parameter.dtype if type(parameter) is nn.Parameter else f"a {type(parameter).__name__}"
            raise ValueError(
                f"parameter {name} is {kind}, and only bfloat16, float16 and float32 train, with a float32 master: "
                "convert it before the optimizer is made (model.float(), torch.view_as_real), or set "
                "requires_grad=False, as adapters beside a quantised weight do"
            )
    refuse_gradients(model, before="protrain.wrap")
    forgotten = [name for name, p in model.named_parameters() if p.requires_grad and p not in held]
    if forgotten:  # plain torch would give them gradients, which another optimizer or a norm may use
        warn_user(
            f"{len(forgotten)} parameters require a gradient but are in no optimizer group: they will not change, and "
            f"have no .grad. One of them is {forgotten[0]}. Another optimizer cannot train them: give this one a group"
        )


def refuse_gradients(model: nn.Module, *, before: str) -> None:
    """ValueError if a parameter has a gradient, which no script expects to be there ``before`` the training begins."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.grad is not None:
            raise ValueError(
                f"parameter {name} has a gradient already, which the first step would add to its own: call "
                f"optimizer.zero_grad() before {before}"
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise a ValueError if a trained parameter shares memory with another parameter or a buffer.

    In a chunk it would have memory of its own, and what becomes of one would no longer become of the other.
    """
    ends: dict[StorageWeakRef, tuple[int, str, bool]] = {}  # how far a storage is occupied, and by what
    found = [
        (storage_key(tensor), int(tensor.storage_offset()) * tensor.element_size(), name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.numel() and split_up(tensor) is None
    ]
    for storage, start, name, tensor in sorted(found, key=lambda part: part[1]):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        bytes_to_end = tensor.element_size() * (1 + sum((int(size) - 1) * stride for size, stride in steps))
        end, other, trained = ends.get(storage, (0, "", False))
        if start < end and (trained or tensor.requires_grad):
            raise ValueError(
                f"{other} and {name} share memory without being one parameter, so training would part them: make them "
                "one (module.weight = other.weight), or give each its own memory (clone()). peft makes such parameters "
                "of tied embeddings that have adapters: leave out ensure_weight_tying"
            )
        ends[storage] = max((end, other, trained), (start + bytes_to_end, name, tensor.requires_grad))


def choose_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The type of the weights that ``dtype`` means. None means bfloat16 on a GPU and float32 on a CPU."""
    if dtype is None:
        return DTYPES[default_dtype(device.type)]
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype must be bfloat16, float16 or float32, not {dtype!r}")
    return found


def _check_kind(name: str, tensor: Tensor) -> None:
    """Raise a ValueError if the parameter or buffer ``name`` is of a kind that cannot be placed on the device."""
    what = f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name}"
    if any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__):
        raise ValueError(
            f"{what} is a DTensor, which lies on several devices, as tensor, context or pipeline parallelism and "
            "replicas of shards (HSDP) have it: ProTrain shards ordinary tensors over one process group, so build the "
            "model without a device mesh, or put full_tensor() of it in its place"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{what} is {layout}, which ProTrain cannot place: keep a dense one")


def retire(optimizer: torch.optim.Optimizer) -> None:
    """Make the wrapped ``optimizer`` raise an error where it would now silently do nothing or save nothing.

    Its param_groups stay live, and schedulers that were made with it keep working.
    """
    for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        vars(optimizer)[name] = partial(_refuse, name)
    # step is not replaced as an attribute, because schedulers replace it and warn if someone else did.
    _watch_steps()


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise MisuseError(
        f"{name}() of the optimizer that protrain.wrap was given does not work any more, as its gradients and its "
        "state have moved: use the optimizer that it returned"
    )


@cache
def _watch_steps() -> None:
    """Let ``_check_step`` look at the steps of all optimizers, from the first call on."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse a step of any optimizer that ``protrain.wrap`` did not return, as it would find no gradients."""
    if isinstance(optimizer, ProTrainOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, PresentParameter) and parameter.requires_grad:
                raise MisuseError(
                    f"step() of an optimizer that protrain.wrap did not return ({type(optimizer).__name__}) cannot "
                    f"train {parameter.protrain_handle.name}, which lies in ProTrain's chunks: use the optimizer that "
                    "it returned, and give protrain.wrap one AdamW or Adam with a group for everything that is to be "
                    "trained"
                )
