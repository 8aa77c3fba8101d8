"""The one entry point, read from top to bottom.

machine --detect--> HardwareProfile --+
                                      +--search--> Plan --engine--> a training step
model  --profile--> ModelProfile -----+
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from protrain.common import batch as batches
from protrain.common.errors import MisuseError, PlanError
from protrain.common.processes import refuse_several_processes
from protrain.common.progress import COUNTED, Progress
from protrain.engine.build import build_engine
from protrain.engine.states.chunks import DTYPES
from protrain.engine.states.empty import check_recorded, fill_buffers
from protrain.engine.states.weight_files import check_weights
from protrain.engine.weights.parameter import PresentParameter, has_moved
from protrain.forwards import change_forwards
from protrain.hardware import HardwareProfile, detect
from protrain.hardware.allocator import use_expandable_segments
from protrain.optim.given import check_supported, retire
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Plan, check, search
from protrain.planning.plan import MOMENT_DTYPES
from protrain.planning.rates.streaming import staging_bytes
from protrain.planning.search.mismatch import name_other_use, refuse_other_model, refuse_other_parameters
from protrain.profiler import ModelProfile
from protrain.profiler.blocks import checkpointing_switches, find_blocks, say_switched_off, switch_off_checkpointing
from protrain.profiler.cache import cached_profile
from protrain.profiler.trace import parameter_records, profile
from protrain.validate import check_model

Model = TypeVar("Model", bound=nn.Module)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_NOT_CALIBRATED = (
    "this machine is not calibrated, so its plan goes by figures of others: `protrain calibrate` measures it, once, in "
    "under a minute, for a plan that may be faster"
)


def wrap(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    example_batch: Mapping[str, Any] | tuple[Any, ...],
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
    progress: bool = True,
) -> tuple[Model, ProTrainOptimizer]:
    """Make ``model`` and ``optimizer`` train within the memory there is, with the results of the plain loop.

    Args:
        model: any module; on the CPU, on a GPU, or built under :func:`protrain.empty_parameters`. Trained as it is in
            training mode. The same object comes back, with hooks.
        optimizer: torch.optim.AdamW or Adam over the model's parameters, with any groups. Its param_groups stay live.
        example_batch: a mapping (``model(**batch)``) or a tuple (``model(*batch)``), in every dimension as long as any
            batch of the training.
        device: "cuda", "cuda:1", "cpu"; default: the current GPU, or the CPU when there is none.
        dtype: of the weights: bfloat16 (default on GPUs), float16 (needs ``optimizer.backward(loss)``) or float32
            (default on the CPU). Parameters are cast, and the model's fp32 inputs with them, but no buffers: in
            bfloat16 an input of 999.0 is 1000, so pass timesteps, positions and the like as integers, which are not
            cast, or use float32. The master is fp32 always.
        device_memory: bytes or "24GiB" to stay within; default: what is free. On the CPU a simulated budget.
        host_memory: likewise for host memory.
        plan: a Plan, or a JSON file of one, in place of the search.
        weights: a folder of safetensors, loaded straight into the chunks.
        step_during_backward: start updates inside backward; not with clipping, float16, or a backward() without step().
        accumulation: backward() calls of a step, whose gradients are summed in fp32: 1, or the plan has room for the
            sums, and its time is that of all of them.
        moment_dtype: of Adam's two moments: bfloat16 takes 4 bytes a parameter less, for models that else do not fit.
            They are rounded at random, so that in the mean nothing is lost (``protrain_kernels.stochastic_rounding``).
            Same bits under every plan, but not those of float32. The master is fp32 always.
        compile: compile the forward of the blocks, once for all of a kind (torch.compile). Same bits under every plan,
            but not those of ``compile=False``.
        chunked_loss: compute the loss of a transformers causal language model piece by piece (Liger), so that its
            logits are never whole; the output's ``logits`` are empty then. Same bits under every plan, but not those of
            ``chunked_loss=False``.
        progress: print what is being done to standard error.

    Returns:
        (model, optimizer): the same model, and the optimizer to use from now on.

    Raises:
        ValueError: an argument is wrong; the message names it and the remedy.
        PlanError: no plan fits the memory; raised before any is taken.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if torch.is_inference_mode_enabled():
        raise ValueError("protrain.wrap inside torch.inference_mode(), where nothing can be trained: call it outside")
    if any(isinstance(parameter, PresentParameter) for parameter in model.parameters()):
        raise ValueError("the model is wrapped already: use the model and optimizer that protrain.wrap returned")
    moved = [name for name, parameter in model.named_parameters() if has_moved(parameter)]
    if moved and weights is None:
        raise ValueError(
            f"the weights of this model are gone, {moved[0]} among them: an earlier protrain.wrap failed after it had "
            "moved them. Build the model again, or pass weights="
        )
    refuse_several_processes(ValueError)
    check_supported(optimizer)
    batches.check(example_batch)
    target = _device(device)
    kind = _dtype(dtype, target)
    if step_during_backward and kind is torch.float16:
        raise ValueError(
            "step_during_backward=True does not work with float16, whose steps may be skipped: use bfloat16"
        )
    moments = next((name for name in MOMENT_DTYPES if moment_dtype in (name, DTYPES[name])), None)
    if moments is None:
        raise ValueError(f"moment_dtype must be float32 or bfloat16, not {moment_dtype!r}")
    if not isinstance(accumulation, int) or accumulation < 1:
        raise ValueError(f"accumulation must be 1 or more, the backward() calls of a step, not {accumulation!r}")
    if not isinstance(plan, Plan | str | os.PathLike | None):
        raise ValueError(f"plan must be a Plan, or the path of a JSON file of one, not a {type(plan).__name__}")
    check_model(model, optimizer, target)
    check_recorded(model, loaded=weights is not None)
    # Read before the profile, which takes minutes for a large model on a CPU.
    given, file = (plan, None) if plan is None or isinstance(plan, Plan) else (Plan.load(plan), plan)
    if given is not None:
        records, n_blocks = parameter_records(model, optimizer), len(find_blocks(model))
        with naming(file):
            refuse_other_parameters(given, type(model).__name__, records, _NAMES[kind], n_blocks=n_blocks)
    if weights is not None:
        check_weights(model, Path(weights), stacklevel=2)
    say_switched_off(switch_off_checkpointing(checkpointing_switches(model)), stacklevel=2)
    say = Progress(enabled=progress)
    gc.collect()  # a model wrapped before and dropped is a cycle: hooks and engine refer to each other

    if target.type == "cuda":
        use_expandable_segments()
    hardware = detect(target, device_memory=device_memory, host_memory=host_memory)
    fill_buffers(model, target)
    if given is None and hardware.device_type == "cuda" and hardware.source != "measured":
        say.note(_NOT_CALIBRATED)
    change = partial(change_forwards, model, target, compile=compile, chunked_loss=chunked_loss)
    with ExitStack() as changes:
        changes.callback(change())
        model_profile = _profile(
            model,
            example_batch,
            optimizer,
            device=target,
            device_bytes=hardware.device_bytes,
            dtype=kind,
            change=change,
            changes=changes,
            say=say,
        )
        model_profile = replace(model_profile, accumulation=accumulation, moment_dtype=moments)
        with say.stage("planning"), naming(file):
            chosen = _plan(given, model_profile, hardware, step_during_backward=step_during_backward)
        say.note(f"the plan: {chosen}")
        with say.bar("moving model states into place") as show:
            engine, fixed_bytes = build_engine(
                model,
                model_profile,
                chosen,
                device=target,
                device_bytes=hardware.device_bytes,
                host_bytes=hardware.host_bytes,
                host_threads=_host_threads(hardware),
                streaming_bytes=staging_bytes(chosen.chunk_elements),
                weights=os.fspath(weights) if weights is not None else None,
                show=show,
            )
        changes.pop_all()
    wrapped = ProTrainOptimizer(
        engine,
        optimizer,
        step_during_backward=step_during_backward,
        device_bytes=fixed_bytes,
        hardware=hardware,
    )
    wrapped.adopt_state()
    retire(optimizer)
    _extend(model, wrapped, engine.placeholder)
    return model, wrapped


def _device(device: str | torch.device | None) -> torch.device:
    try:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        found = torch.device(default if device is None else device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a CUDA GPU or the CPU, not {device!r}") from None
    if found.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be a CUDA GPU or the CPU, not {found}")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "device='cuda', but there is no CUDA GPU here: pass device='cpu', or install a CUDA build of torch"
            )
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
        if found.index is not None and found.index >= torch.cuda.device_count():
            raise ValueError(f"device={str(found)!r}, but there are {torch.cuda.device_count()} GPUs here")
    return found


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype must be bfloat16, float16 or float32, not {dtype!r}")
    return found


def _host_threads(hardware: HardwareProfile) -> int:
    """Of the host optimizer: what calibration found best beside a thread that launches, or all but two cores."""
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
    say: Progress,
) -> ModelProfile:
    """The measured profile, or where not even that fits the device, one that is counted.

    A trace needs about what the smallest plan does, so that the search then says by how much the batch is too large, or
    finds a plan that just fits.
    """
    with say.stage("profiling the model") as show:
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
            except Exception:  # not every model can be traced without values
                raise error from None
            finally:
                undo()
            changes.callback(change())
    say.note(COUNTED)
    return counted


@contextmanager
def naming(file: str | os.PathLike[str] | None) -> Iterator[None]:
    """Errors inside are of the plan in ``file``, and say so; None: of one that is from no file."""
    try:
        yield
    except ValueError as error:
        if file is not None:
            error.args = (f"{os.fspath(file)}: {error}",)  # the same error, as a PlanError has more than its text
        raise


def _plan(
    plan: Plan | None,
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    step_during_backward: bool,
) -> Plan:
    if plan is None:
        return search(profile, hardware, step_during_backward=step_during_backward)
    refuse_other_model(plan, profile)
    try:
        return check(plan, profile, hardware, step_during_backward=step_during_backward)
    except PlanError as error:
        raise name_other_use(error, plan, profile) from None


def _extend(model: nn.Module, optimizer: ProTrainOptimizer, sample: torch.Tensor) -> None:
    """What the wrapped model has beyond the plain one: DDP's ``no_sync``, and a ``zero_grad`` that knows the chunks."""

    @contextmanager
    def no_sync() -> Iterator[None]:
        """Backwards inside only accumulate; the step's last backward() goes outside."""
        with optimizer.accumulating():
            yield

    @wraps(model.zero_grad)
    def zero_grad(set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none)

    vars(model).update(no_sync=no_sync, zero_grad=zero_grad)
    for module in model.modules():
        vars(module)["_apply"] = partial(_refuse_to_move, module, sample)


def _refuse_to_move(
    module: Model, sample: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Model:
    """What ``to``, ``half``, ``cuda`` and their like call: a parameter that they replaced would leave its chunk."""
    moved = function(sample)
    if (moved.dtype, moved.device) != (sample.dtype, sample.device):
        raise MisuseError(
            f"a wrapped model cannot be moved from {sample.device} in {sample.dtype} to {moved.device} in "
            f"{moved.dtype}: pass device= and dtype= to protrain.wrap"
        )
    return module
