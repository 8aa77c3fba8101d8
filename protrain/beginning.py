"""How a training begins: from its first batch to an engine. The code reads from top to bottom like this picture.

machine --detect--> HardwareProfile --+
                                      +--search--> Plan --build_engine--> Engine
model  --profile--> ModelProfile -----+
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from protrain.common import tables
from protrain.common.errors import PlanError
from protrain.common.parameters import unmanaged_bytes
from protrain.common.progress import COUNTED, bar, note, stage
from protrain.consensus import ProfilingTogether, largest_of_all, of_all, plan_of_first
from protrain.distributed.advice import warn_of_little_memory
from protrain.distributed.ranks import Ranks
from protrain.engine.build import build_engine
from protrain.engine.states.arena import ActivationBytes
from protrain.engine.states.materialise import start_as_first
from protrain.forwards import change_forwards
from protrain.hardware.cache import why_not_cached
from protrain.hardware.detection import detect
from protrain.hardware.memory import available_host_bytes
from protrain.hardware.profile import HardwareProfile
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Plan, check, search
from protrain.planning.memory.model import MemoryModel
from protrain.planning.mismatch import name_other_use
from protrain.planning.plan import BlockMode
from protrain.planning.predict import Models
from protrain.profiler.cache import cached_profile
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.trace import profile
from protrain.validate import Checked, naming

_NOT_CALIBRATED = (
    "this machine is not calibrated, so the plan uses figures measured on other machines: `protrain calibrate` "
    "measures this one, once, in under a minute, for a plan that may be faster"
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to train: arguments of ``protrain.wrap``, which says what they mean."""

    checked: Checked
    device_memory: int | str | None
    host_memory: int | str | None
    step_during_backward: bool
    accumulation: int
    compile: bool
    chunked_loss: bool | None
    gradient_reduction: str

    def same_on_all_ranks(self) -> list[str]:
        """What all ranks must have in common, in words."""
        names = "step_during_backward", "accumulation", "compile", "chunked_loss", "gradient_reduction"
        checked = self.checked
        kinds = [f"device={checked.device.type}", f"dtype={checked.dtype}", f"moment_dtype={checked.moment_dtype}"]
        return [*kinds, *(f"{name}={getattr(self, name)}" for name in names)]


def begin_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    wrapped: ProTrainOptimizer,
    batch: Any,
    way: Way,
    *,
    ranks: Ranks,
) -> None:
    """Profile ``model`` on ``batch``, plan, and give ``wrapped`` an engine.

    Args:
        model: whose forwards are changed as ``way`` says, and then by the engine.
        optimizer: that the user made, with the groups of parameters.
        wrapped: the optimizer that ``wrap`` returns.
        batch: what the plan is made for.
        way: how to train.
        ranks: that train together.

    Raises:
        PlanError: no plan fits the memory. It is raised before any memory is taken.
    """
    checked, inside = way.checked, way.step_during_backward
    target = checked.device
    gc.collect()  # frees a model that was wrapped and dropped: its hooks and engine refer to each other
    hardware = detect(target, device_memory=way.device_memory, host_memory=way.host_memory)
    if way.device_memory is None:  # what is free leaves out a quantised base that is there already, and stays
        hardware = replace(hardware, device_bytes=hardware.device_bytes + unmanaged_bytes(model, target))
    hardware = of_all(ranks, hardware, target)
    if way.device_memory is None:  # it also leaves out what NCCL has taken, which plans count
        hardware = replace(hardware, device_bytes=hardware.device_bytes + hardware.collective_bytes)
    start_as_first(model, ranks)
    if checked.plan is None and hardware.device_type == "cuda" and hardware.source != "measured":
        why = why_not_cached(target)
        note(_NOT_CALIBRATED if why is None else f"{_NOT_CALIBRATED}; {why}")
    with ExitStack() as changes:
        model_profile = _profile(model, batch, optimizer, way, changes, ranks, device_bytes=hardware.device_bytes)
        model_profile = largest_of_all(ranks, model_profile)
        model_profile = replace(model_profile, accumulation=way.accumulation, moment_dtype=checked.moment_dtype)
        with stage("planning"), naming(checked.plan_file):
            chosen = plan_of_first(ranks, partial(_plan, way, model_profile, hardware))
            models = Models.of(chosen, model_profile, hardware, step_during_backward=inside)
        note(tables.wrapped(f"the plan: {chosen}", tables.WIDTH - len("protrain: "), indent="  "))
        warn_of_little_memory(model, ranks, target, plan_bytes=chosen.host_bytes, free_bytes=available_host_bytes())
        with bar("moving model states into place") as show:
            engine = build_engine(
                model,
                model_profile,
                chosen,
                ranks=ranks,
                gradient_reduction=way.gradient_reduction,
                device=target,
                device_bytes=hardware.device_bytes,
                activations=_activations(chosen, models.memory),
                host_bytes=hardware.host_bytes,
                host_threads=_host_threads(hardware),
                sharing=models.runtime.sharing(chosen.n_persist),
                groups=wrapped.groups,
                step_during_backward=inside,
                weights=checked.weights,
                show=show,
            )
        changes.pop_all()
    wrapped.begin(engine, hardware=hardware)


def _activations(plan: Plan, memory: MemoryModel) -> ActivationBytes:
    """What forward and backward of the planned batch take on the device under ``plan``."""
    least = memory.device_bytes(plan.counts, memory.activations((BlockMode.CKPT,) * len(plan.block_modes)))
    static_bytes = memory.static_bytes(plan.n_persist, plan.n_buffer, plan.n_device_sum)
    return ActivationBytes(plan.device_bytes - static_bytes, least - static_bytes)


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
    way: Way,
    changes: ExitStack,
    ranks: Ranks,
    *,
    device_bytes: int,
) -> ModelProfile:
    """Change the forwards, until ``changes`` ends, and measure the profile. If that does not fit, count it.

    A trace needs about as much memory as the smallest plan. With a profile that is counted on the meta device, the
    search says by how much the batch is too large, or finds a plan that just fits.
    """
    device, dtype = way.checked.device, way.checked.dtype
    # A plan fits the loss that it was made for, so it decides where the user does not.
    chunked = getattr(way.checked.plan, "chunked_loss", None) if way.chunked_loss is None else way.chunked_loss
    change = partial(change_forwards, model, example_batch, compile=way.compile, chunked_loss=chunked)
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
    note(COUNTED)
    return counted


def _plan(way: Way, profile: ModelProfile, hardware: HardwareProfile) -> Plan:
    plan, inside = way.checked.plan, way.step_during_backward
    if plan is None:
        return search(profile, hardware, step_during_backward=inside)
    try:
        return check(plan, profile, hardware, step_during_backward=inside)
    except PlanError as error:
        raise name_other_use(error, plan, profile) from None
