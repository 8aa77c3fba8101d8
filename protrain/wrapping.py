"""The one entry point: it checks the arguments, and changes model and optimizer so that they train by a plan.

``protrain.beginning`` makes the plan and the engine, of the example batch or of the first call of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import register_optimizer_step_pre_hook

from protrain.beginning import Way, begin_training
from protrain.common import batch as batches
from protrain.common.errors import MisuseError
from protrain.common.hub import on_disk
from protrain.common.parameters import is_managed, refuse_moves
from protrain.common.progress import heard
from protrain.distributed.advice import compare_first_batches, first_alone_warns, warn_of_copies
from protrain.distributed.agreement import generate_together
from protrain.distributed.devices import refuse_shared_gpu
from protrain.distributed.joining import check_group, join
from protrain.engine.weights.parameter import PresentParameter, frozen_error
from protrain.hardware.allocator import use_expandable_segments
from protrain.hardware.detection import detect
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Plan
from protrain.profiler.blocks import checkpointing_switches, switch_off_checkpointing
from protrain.validate import check_arguments, refuse_gradients

Model = TypeVar("Model", bound=nn.Module)
_retired: WeakSet[torch.optim.Optimizer] = WeakSet()  # those that wrap was given


def wrap(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    example_batch: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    step_during_backward: bool = False,
    accumulation: int = 1,
    moment_dtype: torch.dtype | str = torch.float32,
    compile: bool = False,
    chunked_loss: bool | None = None,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str = "mean",
    progress: bool = True,
) -> tuple[Model, ProTrainOptimizer]:
    """Make ``model`` and ``optimizer`` train within the available memory, with the results of the plain loop.

    Args:
        model: any module, on the CPU, on a GPU, or built under ``protrain.empty_parameters``. It is trained as it
            is in training mode. The same object comes back, with hooks.
        optimizer: torch.optim.AdamW or Adam over the model's parameters, with any groups. Its param_groups stay live.
        example_batch: a mapping (``model(**batch)``), a tuple (``model(*batch)``), or the one argument of the model.
            The plan is made for it, so every dimension should be as long as in any batch of the training: for a larger
            one blocks may have to be recomputed, and it is refused where even so there is no memory for it. Without
            example_batch the model is profiled and planned in its first call, which must be one of the training, with
            the arguments that it is given there.
        device: "cuda", "cuda:1" or "cpu". A GPU becomes the current one. "cuda" is the one GPU that the process sees,
            or the current one; with several processes, of which each needs its own, it is the current one unless that
            is GPU 0, and then the one that LOCAL_RANK names. The default is "cuda", or "cpu" where there is no GPU.
        dtype: the type of the weights: bfloat16 (default on GPUs), float16 (needs ``optimizer.backward(loss)``) or
            float32 (default on the CPU). Parameters and the model's fp32 inputs are cast, buffers are not. In bfloat16
            an input of 999.0 becomes 1000, so pass timesteps, positions and the like as integers, which are not cast,
            or use float32. The master is always fp32.
        device_memory: GPU memory to stay within, in bytes or as "24GiB". The default is that of the environment
            variable PROTRAIN_DEVICE_MEMORY, or else what is free. On the CPU it is a simulated budget.
        host_memory: host memory to stay within, in bytes or as "64GiB". The default is that of the environment variable
            PROTRAIN_HOST_MEMORY, or else what is free.
        plan: a Plan, or a JSON file of one, to use instead of searching.
        weights: a folder of safetensors, which are loaded straight into the chunks, or a model of the Hugging Face Hub
            like "org/model", whose files are downloaded into the cache of transformers.
        step_during_backward: start updates inside backward. It does not work with clipping, with float16, or with a
            backward() that no step() follows.
        accumulation: the most backward() calls that a step has; one more is an error. Their gradients are summed in
            fp32, and the sum is rounded once to ``dtype`` for norm and update. If it is more than 1, the plan includes
            the memory of the sums and the time of all calls.
        moment_dtype: the type of Adam's two moments. bfloat16 takes 4 bytes a parameter less, for models that would not
            fit otherwise. The moments are then rounded at random, so that nothing is lost on average
            (``protrain_kernels.stochastic_rounding``). The bits are the same under every plan, but not those of
            float32. The master is always fp32.
        compile: compile the forward of the blocks, once for all blocks of a kind (torch.compile). The bits are the same
            under every plan, but not those of ``compile=False``.
        chunked_loss: compute the loss of a transformers causal language model piece by piece, so that its logits never
            exist whole. They are computed when the script uses the output's ``logits``, which it must do before
            backward. The bits are the same under every plan, but not those of ``chunked_loss=False``. The default is
            that of ``plan``, or else True where the example batch is a mapping with ``labels`` and it is known to be
            the same loss. True is refused where it is not.
        process_group: the processes that train together, each with a GPU of its own. Their states are sharded. The
            default is the default group of torch.distributed; where there is none and torchrun announces several
            processes, it is started. Every process calls wrap with the same arguments.
        gradient_reduction: "mean" or "sum" of the gradients of all processes. The mean is what DDP takes; the sum is
            for losses that are divided by global counts.
        progress: print to standard error what is being done.

    Returns:
        (model, optimizer): the same model, and the optimizer to use from now on.

    Raises:
        ValueError: an argument is wrong; the message names it and the remedy.
        PlanError: no plan fits the memory. It is raised before any memory is taken.
    """
    check_group(process_group)
    device_memory = os.environ.get("PROTRAIN_DEVICE_MEMORY") if device_memory is None else device_memory
    host_memory = os.environ.get("PROTRAIN_HOST_MEMORY") if host_memory is None else host_memory
    example_batch = batches.of_one(example_batch)
    ranks = join(process_group)
    with ranks.reporting("protrain.wrap"), first_alone_warns(ranks):
        weights = None if weights is None else on_disk(os.fspath(weights), weights=True)
        checked = check_arguments(
            model,
            optimizer,
            example_batch,
            device=device,
            dtype=dtype,
            plan=plan,
            weights=weights,
            step_during_backward=step_during_backward,
            accumulation=accumulation,
            moment_dtype=moment_dtype,
            gradient_reduction=gradient_reduction,
        )
        target = checked.device
        refuse_shared_gpu(ranks, target)
        node = detect(target, device_memory=device_memory, host_memory=host_memory)  # refuses limits that are none
        if target.type == "cuda":
            torch.cuda.set_device(target)  # see [Note: the current GPU] in engine/updates/worker.py
        warn_of_copies(model, ranks, host_bytes=node.host_bytes, is_limit=host_memory is not None)
        way = Way(
            checked=checked,
            device_memory=device_memory,
            host_memory=host_memory,
            weights=os.path.abspath(weights) if weights is not None else None,
            step_during_backward=step_during_backward,
            accumulation=accumulation,
            compile=compile,
            chunked_loss=chunked_loss,
            gradient_reduction=gradient_reduction,
        )
        if ranks.several:
            ranks.agree("model", [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()])
            when = "none" if example_batch is None else "given"
            ranks.agree("way to train", [*way.same_on_all_ranks(), f"example_batch={when}"])
            ranks.use(target)
        switch_off_checkpointing(checkpointing_switches(model), warn=True)
        if target.type == "cuda":
            use_expandable_segments()
        managed = {name: parameter for name, parameter in model.named_parameters() if is_managed(parameter)}
        wrapped = ProTrainOptimizer(optimizer, managed, ranks=ranks, step_during_backward=step_during_backward)
        required = {name: parameter.requires_grad for name, parameter in managed.items()}

    def begin(batch: Any) -> None:
        if any(isinstance(parameter, PresentParameter) for parameter in managed.values()):
            raise MisuseError(
                "an earlier first call of this model failed after its weights had moved: mend what that error named, "
                "build the model again, wrap it, and load its checkpoint again"
            )
        with (
            ranks.reporting("protrain.wrap"),
            first_alone_warns(ranks),
            wrapped.given_back(),
            _trained_as(required, managed),
            heard(progress and ranks.rank == 0),
        ):
            refuse_gradients(model, before="the first call of the model")
            begin_training(model, optimizer, wrapped, batch, way, ranks=ranks)
        compare_first_batches(model, ranks, target)

    if example_batch is not None:
        begin(example_batch)
    else:
        _at_first_call(model, begin)
    _retire(optimizer)
    generate_together(model, ranks)
    _extend(model, wrapped, torch.zeros((), dtype=checked.dtype, device=target))
    return model, wrapped


def _at_first_call(model: nn.Module, begin: Callable[[Any], None]) -> None:
    """Let the first call of ``model`` call ``begin`` with its arguments as a batch. If that raises, the next call does.

    Raises:
        MisuseError: the call is not one of the training.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            raise MisuseError(
                "the first call of a model that was wrapped without an example_batch plans the training, so it must be "
                "a call of the training and not under torch.no_grad(): pass example_batch to protrain.wrap to evaluate "
                "or generate first"
            )
        for name in waiting:
            del vars(model)[name]
        try:
            begin(batches.of_call(model, args, kwargs))
        except BaseException:
            vars(model).update(waiting)
            raise
        return model(*args, **kwargs)

    def refuse_copy(_: dict[int, Any]) -> Any:
        raise MisuseError("a wrapped model cannot be copied: copy it before protrain.wrap, or copy its state_dict()")

    waiting = {"_call_impl": call, "__deepcopy__": refuse_copy}
    vars(model).update(waiting)


@contextmanager
def _trained_as(required: Mapping[str, bool], parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """A context in which ``parameters`` require gradients as they ``required`` them when the model was wrapped.

    A parameter that a script freezes for the first steps has states by this, and can be trained later.

    Raises:
        MisuseError: a parameter requires a gradient now and did not then.
    """
    changed = {name: p for name, p in parameters.items() if p.requires_grad != required[name]}
    for name in changed:
        if not required[name]:
            raise frozen_error(name)
    for parameter in changed.values():
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in changed.values():
            parameter.requires_grad = False


def _extend(model: nn.Module, optimizer: ProTrainOptimizer, sample: torch.Tensor) -> None:
    """Give the wrapped model DDP's ``no_sync``, a ``zero_grad`` that knows the chunks, and a refusal to be moved.

    It also gets the mark by which ``accelerator.prepare`` leaves a model as it is. Accelerate would put autocast and
    DistributedDataParallel around it, and both precision and processes are ProTrain's business.
    """

    @contextmanager
    def no_sync() -> Iterator[None]:
        """Make backwards inside only accumulate gradients. The last backward() of a step goes outside."""
        with optimizer.accumulating():
            yield

    @wraps(model.zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none)

    vars(model).update(no_sync=no_sync, zero_grad=zero_grad, _is_accelerate_prepared=True)
    refuse_moves(model, sample)


def _retire(optimizer: torch.optim.Optimizer) -> None:
    """Make the wrapped ``optimizer`` raise an error where it would now silently do nothing or save nothing.

    Its param_groups stay live, and schedulers that were made with it keep working.
    """
    for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        vars(optimizer)[name] = _refused(name)
    # step is not replaced as an attribute, because schedulers replace it and warn if someone else did.
    _retired.add(optimizer)
    _watch_steps()


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MisuseError(
            f"{name}() of the optimizer that protrain.wrap was given does not work any more, as its gradients and "
            "its state have moved: use the optimizer that it returned"
        )

    return refuse


@cache  # torch keeps the hook, so one is enough
def _watch_steps() -> None:
    """Look from now on at each step of any optimizer, because one that ProTrain does not know of may do nothing.

    It finds no gradients of parameters that are in no group of the wrapped optimizer.
    """
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if optimizer in _retired:
        _refused("step")()
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
