"""The one entry point. The code reads from top to bottom like this picture.

machine --detect--> HardwareProfile --+
+--search--> Plan --engine--> a training step
model  --profile--> ModelProfile -----+
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from protrain.common import batch as batches
from protrain.common import tables
from protrain.common.errors import MisuseError, PlanError
from protrain.common.parameters import is_managed, unmanaged_bytes
from protrain.common.progress import COUNTED, Progress
from protrain.consensus import largest_of_all, of_all, plan_of_first
from protrain.distributed.advice import (
    compare_first_batches,
    first_alone_warns,
    warn_of_copies,
    warn_of_little_memory,
)
from protrain.distributed.generation import generate_together
from protrain.distributed.joining import check_group, join
from protrain.distributed.ranks import Ranks
from protrain.engine.build import build_engine
from protrain.engine.states.empty import fill_buffers
from protrain.forwards import change_forwards
from protrain.hardware import HardwareProfile, detect
from protrain.hardware.allocator import use_expandable_segments
from protrain.hardware.memory import available_host_bytes
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.optim.user_optimizer import retire
from protrain.planning import Plan, check, search
from protrain.planning.mismatch import name_other_use
from protrain.planning.predict import Models
from protrain.profiler import ModelProfile
from protrain.profiler.blocks import checkpointing_switches, say_switched_off, switch_off_checkpointing
from protrain.profiler.cache import cached_profile
from protrain.profiler.trace import profile
from protrain.validate import Checked, check_arguments, naming

Model = TypeVar("Model", bound=nn.Module)

_NOT_CALIBRATED = (
    "this machine is not calibrated, so the plan uses figures measured on other machines: `protrain calibrate` "
    "measures this one, once, in under a minute, for a plan that may be faster"
)


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
    chunked_loss: bool = False,
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
            Every dimension must be as long as in any batch of the training. Without it the model is profiled and
            planned in its first call, which must be one of the training, with the arguments that it is given there.
        device: "cuda", "cuda:1" or "cpu". The default is the current GPU, or the CPU if there is none.
        dtype: the type of the weights: bfloat16 (default on GPUs), float16 (needs ``optimizer.backward(loss)``) or
            float32 (default on the CPU). Parameters and the model's fp32 inputs are cast, buffers are not. In bfloat16
            an input of 999.0 becomes 1000, so pass timesteps, positions and the like as integers, which are not cast,
            or use float32. The master is always fp32.
        device_memory: GPU memory to stay within, in bytes or as "24GiB". The default is what is free. On the CPU it is
            a simulated budget.
        host_memory: host memory to stay within, in bytes or as "64GiB". The default is what is free.
        plan: a Plan, or a JSON file of one, to use instead of searching.
        weights: a folder of safetensors, which are loaded straight into the chunks.
        step_during_backward: start updates inside backward. It does not work with clipping, with float16, or with a
            backward() that no step() follows.
        accumulation: the number of backward() calls in a step. Their gradients are summed in fp32, and the sum is
            rounded once to ``dtype`` for norm and update. If it is more than 1, the plan includes the memory of the
            sums and the time of all calls.
        moment_dtype: the type of Adam's two moments. bfloat16 takes 4 bytes a parameter less, for models that would not
            fit otherwise. The moments are then rounded at random, so that nothing is lost on average
            (``protrain_kernels.stochastic_rounding``). The bits are the same under every plan, but not those of
            float32. The master is always fp32.
        compile: compile the forward of the blocks, once for all blocks of a kind (torch.compile). The bits are the same
            under every plan, but not those of ``compile=False``.
        chunked_loss: compute the loss of a transformers causal language model piece by piece (Liger), so that its
            logits never exist whole; the output's ``logits`` are empty then. The bits are the same under every plan,
            but not those of ``chunked_loss=False``.
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
    example_batch = batches.of_one(example_batch)
    ranks = join(process_group)
    with ranks.reporting("protrain.wrap"), first_alone_warns(ranks):
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
        node = detect(target, device_memory=device_memory, host_memory=host_memory)  # refuses limits that are none
        warn_of_copies(model, ranks, host_bytes=node.host_bytes, is_limit=host_memory is not None)
        if ranks.several:
            ranks.agree("model", [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()])
            way = {
                "device": target.type,
                "dtype": checked.dtype,
                "moment_dtype": checked.moment_dtype,
                "step_during_backward": step_during_backward,
                "accumulation": accumulation,
                "compile": compile,
                "chunked_loss": chunked_loss,
                "gradient_reduction": gradient_reduction,
                "example_batch": "none" if example_batch is None else "given",
            }
            ranks.agree("way to train", [f"{name}={value}" for name, value in way.items()])
            ranks.use(target)
        say_switched_off(switch_off_checkpointing(checkpointing_switches(model)), stacklevel=2)
        if target.type == "cuda":
            use_expandable_segments()
        managed = {name: parameter for name, parameter in model.named_parameters() if is_managed(parameter)}
        wrapped = ProTrainOptimizer(optimizer, managed, ranks=ranks, step_during_backward=step_during_backward)

    def begin(batch: Any) -> None:
        with ranks.reporting("protrain.wrap"), first_alone_warns(ranks):
            _begin(
                model,
                optimizer,
                wrapped,
                batch,
                checked,
                device_memory=device_memory,
                host_memory=host_memory,
                weights=os.fspath(weights) if weights is not None else None,
                accumulation=accumulation,
                compile=compile,
                chunked_loss=chunked_loss,
                ranks=ranks,
                gradient_reduction=gradient_reduction,
                stages=Progress(enabled=progress and ranks.rank == 0),
            )
        compare_first_batches(model, ranks, target)

    if example_batch is not None:
        begin(example_batch)
    else:
        _at_first_call(model, begin)
    retire(optimizer)
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


def _begin(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wrapped: ProTrainOptimizer,
    batch: Any,
    checked: Checked,
    *,
    device_memory: int | str | None,
    host_memory: int | str | None,
    weights: str | None,
    accumulation: int,
    compile: bool,
    chunked_loss: bool,
    ranks: Ranks,
    gradient_reduction: str,
    stages: Progress,
) -> None:
    """Profile ``model`` on ``batch``, plan, and give ``wrapped`` an engine. The arguments are those of ``wrap``."""
    target, inside = checked.device, wrapped.step_during_backward
    gc.collect()  # frees a model that was wrapped and dropped: its hooks and engine refer to each other
    hardware = detect(target, device_memory=device_memory, host_memory=host_memory)
    if device_memory is None:  # what is free leaves out a quantised base that is there already, and stays
        hardware = replace(hardware, device_bytes=hardware.device_bytes + unmanaged_bytes(model, target))
    hardware = of_all(ranks, hardware, target)
    fill_buffers(model, target)
    if checked.plan is None and hardware.device_type == "cuda" and hardware.source != "measured":
        stages.note(_NOT_CALIBRATED)
    change = partial(change_forwards, model, target, compile=compile, chunked_loss=chunked_loss)
    with ExitStack() as changes:
        changes.callback(change())
        model_profile = _profile(
            model,
            batch,
            optimizer,
            device=target,
            device_bytes=hardware.device_bytes,
            dtype=checked.dtype,
            change=change,
            changes=changes,
            stages=stages,
        )
        model_profile = largest_of_all(ranks, model_profile)
        model_profile = replace(model_profile, accumulation=accumulation, moment_dtype=checked.moment_dtype)
        with stages.stage("planning"), naming(checked.plan_file):
            chosen = plan_of_first(
                ranks, partial(_plan, checked.plan, model_profile, hardware, step_during_backward=inside)
            )
            runtime = Models.of(chosen, model_profile, hardware, step_during_backward=inside).runtime
        stages.note(tables.wrapped(f"the plan: {chosen}", tables.WIDTH - len("protrain: "), indent="  "))
        warn_of_little_memory(model, ranks, target, plan_bytes=chosen.host_bytes, free_bytes=available_host_bytes())
        with stages.bar("moving model states into place") as show:
            engine, fixed_bytes = build_engine(
                model,
                model_profile,
                chosen,
                ranks=ranks,
                gradient_reduction=gradient_reduction,
                device=target,
                device_bytes=hardware.device_bytes,
                host_bytes=hardware.host_bytes,
                host_threads=_host_threads(hardware),
                sharing=runtime.sharing(chosen.n_persist),
                groups=wrapped.groups,
                step_during_backward=inside,
                weights=weights,
                show=show,
            )
        changes.pop_all()
    wrapped.begin(engine, device_bytes=fixed_bytes, hardware=hardware)


def _host_threads(hardware: HardwareProfile) -> int:
    """The threads of the host optimizer: the number that calibration found best, or all but two cores.

    The best number is measured while another thread launches kernels.
    """
    if hardware.device_type == "cpu":
        return max(1, hardware.cpu_threads // 2)
    return max(1, min(hardware.host_adam_threads or hardware.cpu_threads - 2, hardware.cpu_threads))


def _profile(
    model: nn.Module,
    example_batch: Any,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    device_bytes: int,
    dtype: torch.dtype,
    change: Callable[..., Callable[[], None]],
    changes: ExitStack,
    stages: Progress,
) -> ModelProfile:
    """Measure the profile. If the trace does not fit the device, count it on the meta device.

    A trace needs about as much memory as the smallest plan. With the counted profile, the search says by how much the
    batch is too large, or finds a plan that just fits.
    """
    with stages.stage("profiling the model") as show:
        try:
            return cached_profile(
                model,
                example_batch,
                optimizer=optimizer,
                device=device,
                dtype=dtype,
                show=show,
                device_bytes=device_bytes,
            )
        except torch.OutOfMemoryError as error:
            changes.close()
            undo = change(on_meta=True)
            try:
                counted = profile(model, example_batch, optimizer=optimizer, device="meta", dtype=dtype, show=show)
            except Exception:  # some models cannot be traced without values
                raise error from None
            finally:
                undo()
            changes.callback(change())
    stages.note(COUNTED)
    return counted


def _plan(
    plan: Plan | None,
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    step_during_backward: bool,
) -> Plan:
    if plan is None:
        return search(profile, hardware, step_during_backward=step_during_backward)
    try:
        return check(plan, profile, hardware, step_during_backward=step_during_backward)
    except PlanError as error:
        raise name_other_use(error, plan, profile) from None


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
    for module in model.modules():
        vars(module)["_apply"] = partial(_refuse_to_move, module, sample)


def _refuse_to_move(
    module: Model, sample: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Model:
    """Refuse what ``to``, ``half``, ``cuda`` and the like would do.

    A parameter that they replaced would leave its chunk.
    """
    moved = function(sample)
    if (moved.dtype, moved.device) != (sample.dtype, sample.device):
        raise MisuseError(
            f"a wrapped model cannot be moved from {sample.device} in {sample.dtype} to {moved.device} in "
            f"{moved.dtype}: pass device= and dtype= to protrain.wrap"
        )
    return module
