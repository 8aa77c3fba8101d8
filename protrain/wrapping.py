"""The one entry point: it checks the arguments, and changes model and optimizer so that they train by a plan.

The plan is made of the example batch, or of the first call of the model. ``_begin_training`` reads from top to bottom
like this picture.

machine --detect--> HardwareProfile --+
                                      +--search--> Plan --build_engine--> Engine
model  --profile--> ModelProfile -----+
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from protrain.common import batch as batches
from protrain.common import tables
from protrain.common.cache import on_disk
from protrain.common.errors import MisuseError, PlanError
from protrain.common.parameters import is_managed, refuse_moves, unmanaged_bytes
from protrain.common.progress import COUNTED, heard, print_line, stage
from protrain.consensus import ProfilingTogether, largest_of_all, of_all, plan_of_first
from protrain.distributed.advice import compare_first_batches, first_alone_warns, warn_of_copies, warn_of_little_memory
from protrain.distributed.agreement import generate_together
from protrain.distributed.devices import refuse_shared_gpu
from protrain.distributed.joining import check_group, join
from protrain.distributed.ranks import Ranks
from protrain.engine.build import build_engine
from protrain.engine.states.arena import ActivationBytes
from protrain.engine.states.materialise import start_as_first
from protrain.engine.weights.parameter import PresentParameter
from protrain.forward.chunked_loss import can_chunk, chunk_loss
from protrain.forward.compilation import compile_blocks
from protrain.hardware.cache import why_not_cached
from protrain.hardware.detection import detect, use_expandable_segments
from protrain.hardware.memory import available_host_bytes, update_threads
from protrain.hardware.profile import HardwareProfile
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Plan, check, search
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import BlockMode, name_other_use
from protrain.planning.predict import Models
from protrain.planning.prose import in_short
from protrain.profiler.blocks import checkpointing_switches, find_blocks, switch_off_checkpointing
from protrain.profiler.cache import cached_profile
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.trace import profile
from protrain.validate import TrainingOptions, check_arguments, refuse_gradients, retire

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
        options = check_arguments(
            model,
            optimizer,
            example_batch,
            device=device,
            dtype=dtype,
            plan=plan,
            device_memory=device_memory,
            host_memory=host_memory,
            weights=None if weights is None else on_disk(os.fspath(weights), weights=True),
            step_during_backward=step_during_backward,
            accumulation=accumulation,
            moment_dtype=moment_dtype,
            compile=compile,
            chunked_loss=chunked_loss,
            gradient_reduction=gradient_reduction,
        )
        target = options.device
        refuse_shared_gpu(ranks, target)
        node = detect(target, device_memory=device_memory, host_memory=host_memory)  # refuses limits that are none
        if target.type == "cuda":
            torch.cuda.set_device(target)  # see [Note: the current GPU] in engine/updates/worker.py
        warn_of_copies(model, ranks, host_bytes=node.host_bytes, is_limit=host_memory is not None)
        if ranks.several:
            ranks.agree("model", [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()])
            ranks.agree(
                "way to train", [*options.same_on_all_ranks(), f"example_batch given: {example_batch is not None}"]
            )
            ranks.use(target)
        switch_off_checkpointing(checkpointing_switches(model), warn=True)
        if target.type == "cuda":
            use_expandable_segments()
        managed = {name: parameter for name, parameter in model.named_parameters() if is_managed(parameter)}
        wrapped = ProTrainOptimizer(optimizer, managed, ranks=ranks)

    def begin(batch: Any) -> None:
        if any(isinstance(parameter, PresentParameter) for parameter in managed.values()):
            raise MisuseError(
                "an earlier first call of this model failed after its weights had moved: mend what that error named, "
                "build the model again, wrap it, and load its checkpoint again"
            )
        with (
            ranks.reporting("protrain.wrap"),
            first_alone_warns(ranks),
            wrapped.first_call.begins(),
            torch.inference_mode(False),
            heard(progress and ranks.rank == 0),
        ):
            refuse_gradients(model, before="the first call of the model")
            _begin_training(model, optimizer, wrapped, batch, options, ranks=ranks)
        compare_first_batches(model, ranks, target)

    if example_batch is not None:
        begin(example_batch)
    else:
        _plan_at_first_call(model, begin)
    retire(optimizer)
    generate_together(model, ranks)
    refuse_moves(model, torch.zeros((), dtype=options.dtype, device=target))
    # Accelerate's mark of a prepared model. It would put autocast and DistributedDataParallel around another one.
    vars(model).update(no_sync=wrapped.no_sync, zero_grad=wrapped.zero_grad, _is_accelerate_prepared=True)
    return model, wrapped


def _begin_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wrapped: ProTrainOptimizer,
    batch: Any,
    options: TrainingOptions,
    *,
    ranks: Ranks,
) -> None:
    """Profile ``model`` on ``batch``, plan for that as ``options`` say, and give ``wrapped`` an engine.

    Raises:
        PlanError: no plan fits the memory. It is raised before any memory is taken.
    """
    target = options.device
    gc.collect()  # frees a model that was wrapped and dropped: its hooks and engine refer to each other
    hardware = detect(target, device_memory=options.device_memory, host_memory=options.host_memory)
    if options.device_memory is None:  # what is free leaves out a quantised base that is there already, and stays
        hardware = replace(hardware, device_bytes=hardware.device_bytes + unmanaged_bytes(model, target))
    hardware = of_all(ranks, hardware, target)
    if options.device_memory is None:  # it also leaves out what NCCL has taken, which plans count
        hardware = replace(hardware, device_bytes=hardware.device_bytes + hardware.collective_bytes)
    start_as_first(model, ranks)
    if options.plan is None and hardware.device_type == "cuda" and hardware.source != "measured":
        why = why_not_cached(target)
        print_line(_NOT_CALIBRATED if why is None else f"{_NOT_CALIBRATED}; {why}")
    with ExitStack() as changes:
        model_profile = largest_of_all(
            ranks,
            _profile(model, batch, optimizer, options, changes, ranks, device_bytes=hardware.device_bytes),
        )
        model_profile = replace(
            model_profile,
            accumulation=options.accumulation,
            moment_dtype=options.moment_dtype,
            step_during_backward=options.step_during_backward,
        )
        with stage("planning"):
            chosen = plan_of_first(ranks, partial(_plan, options, model_profile, hardware))
            models = Models.of(chosen, model_profile, hardware)
        said = f"{in_short(chosen, models)}\nthe plan: {chosen}"
        print_line(tables.wrapped(said, tables.WIDTH - len("protrain: "), indent="  "))
        warn_of_little_memory(model, ranks, target, plan_bytes=chosen.host_bytes, free_bytes=available_host_bytes())
        with stage("moving model states into place") as show:
            engine = build_engine(
                model,
                model_profile,
                chosen,
                ranks=ranks,
                gradient_reduction=options.gradient_reduction,
                device=target,
                device_bytes=hardware.device_bytes,
                activations=_activations(chosen, models.memory),
                host_bytes=hardware.host_bytes,
                host_threads=_host_threads(hardware),
                sharing=models.steps.sharing(chosen.n_persist),
                groups=wrapped.groups,
                weights=options.weights,
                show=show,
            )
        changes.pop_all()
    wrapped.attach(engine, hardware=hardware)


def _activations(plan: Plan, memory: MemoryModel) -> ActivationBytes:
    """What forward and backward of the planned batch take on the device under ``plan``."""
    least = memory.device_bytes(plan.counts, (BlockMode.CKPT,) * len(plan.block_modes))
    static_bytes = memory.static_bytes(plan.n_persist, plan.n_buffer, plan.n_device_sum)
    return ActivationBytes(plan.device_bytes - static_bytes, least - static_bytes)


def _host_threads(hardware: HardwareProfile) -> int:
    """The threads of the host optimizer: as many as its calibrated rate is of, where there are as many cores."""
    usual = update_threads(hardware.cpu_threads, beside_gpu=hardware.device_type == "cuda")
    return min(hardware.host_adam_threads or usual, hardware.cpu_threads)


def _profile(
    model: nn.Module,
    example_batch: Any,
    optimizer: torch.optim.Optimizer,
    options: TrainingOptions,
    changes: ExitStack,
    ranks: Ranks,
    *,
    device_bytes: int,
) -> ModelProfile:
    """Change the forwards, until ``changes`` ends, and measure the profile. If that does not fit, count it.

    A trace needs about as much memory as the smallest plan. With a profile that is counted on the meta device, the
    search says by how much the batch is too large, or finds a plan that just fits.
    """
    device, dtype = options.device, options.dtype
    # A plan fits the loss that it was made for, so it decides where the user does not.
    chunked = getattr(options.plan, "chunked_loss", None) if options.chunked_loss is None else options.chunked_loss
    change = partial(change_forwards, model, example_batch, compile=options.compile, chunked_loss=chunked)
    changes.callback(change())
    together = ProfilingTogether(ranks)
    with stage("profiling the model") as show:
        try:
            return cached_profile(
                model,
                example_batch,
                optimizer=optimizer,
                device=device,
                dtype=dtype,
                show=show,
                device_bytes=device_bytes,
                together=together,
            )
        except torch.OutOfMemoryError as error:
            together.leave(error)
            changes.close()
            undo = change(on_meta=True)
            try:
                counted = profile(model, example_batch, optimizer=optimizer, device="meta", dtype=dtype, show=show)
            except Exception:  # some models cannot be traced without values
                raise error from None
            finally:
                undo()
            changes.callback(change())
    print_line(COUNTED)
    return counted


def _plan(options: TrainingOptions, profile: ModelProfile, hardware: HardwareProfile) -> Plan:
    plan = options.plan
    if plan is None:
        return search(profile, hardware)
    try:
        return check(plan, profile, hardware)
    except PlanError as error:
        raise name_other_use(error, plan, profile) from None


def change_forwards(
    model: nn.Module, batch: Any, *, compile: bool, chunked_loss: bool | None, on_meta: bool = False
) -> Callable[[], None]:
    """Change ``model`` for training. Returns a function that undoes it.

    Args:
        model: that is trained.
        batch: of the training. It tells whether the model computes its loss, for which it needs labels.
        compile: the forward of each block.
        chunked_loss: compute the loss piece by piece. None means yes where that is known to be the same loss.
        on_meta: change it only for a trace on the meta device.

    Raises:
        ValueError: as ``protrain.forward.chunked_loss.chunk_loss``. After any exception, nothing is changed.
    """
    if chunked_loss is None:
        chunked_loss = isinstance(batch, Mapping) and batch.get("labels") is not None and can_chunk(model)
    blocks = [model.get_submodule(path) for path in find_blocks(model)] if compile else []
    changes: ExitStack[None] = ExitStack()
    with changes:
        if chunked_loss:
            changes.callback(chunk_loss(model))
        changes.callback(compile_blocks(blocks, on_meta=on_meta))
        return changes.pop_all().close


def _plan_at_first_call(model: nn.Module, begin: Callable[[Any], None]) -> None:
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
