"""How the engine is hooked into the user's model: it replaces forwards of instances, and hooks parameters.

The model stays the same object. The ``forward`` of a unit becomes a run of the engine around the original, and the
``forward`` of the model also moves inputs to the device. Signatures stay, as libraries inspect them. If the user has
hooks on a unit, the engine has the parameters of the unit on the device for these hooks, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from protrain.common import batch as batches
from protrain.common.errors import MisuseError
from protrain.distributed.joining import announced_processes, refuse_others
from protrain.engine.engine import Engine
from protrain.engine.inputs import PlannedBatch
from protrain.engine.streams import span
from protrain.engine.units import Unit
from protrain.engine.weights.handle import Handle
from protrain.engine.weights.parameter import PresentParameter
from protrain.forward.compilation import CompiledForward
from protrain.planning.timeline import GPU
from protrain.profiler.blocks import checkpointing_switches, switch_off_checkpointing


def install(engine: Engine) -> None:
    """Hook the engine into its model."""
    # The backward of a graph that has saved a parameter then fails. The versions of all parameters rise before any is
    # read below, as parameters that are views of one memory share a version.
    torch.autograd.graph.increment_version([member.parameter for member in engine.members])
    for member in engine.members:
        handle = Handle(member.name, member.index, engine)
        if member.parameter.requires_grad:
            member.parameter.register_post_accumulate_grad_hook(handle.gradient_ready)
        member.parameter.__class__ = PresentParameter
        vars(member.parameter)["protrain_handle"] = handle
        member.edits = member.parameter._version
        engine.bindings.release(member)
    for unit in engine.units:
        original = unit.module.forward
        if isinstance(original, CompiledForward):
            original = _with_plain_parameters(unit.module, original)
        _replace_forward(unit.module, functools.partial(engine.visits.run, unit, original, False))
    root = _Root(engine)
    _replace_forward(engine.model, root.forward)
    for unit in engine.units:
        vars(unit.module)["_call_impl"] = _unit_call(engine, unit)
    root.watch_calls()


def _replace_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Have ``module.forward(...)`` call ``run(...)``.

    The new forward keeps the signature of the original, as libraries inspect it. It is a method, as libraries unbind it
    and bind it again. It has no ``__wrapped__``, because accelerate would call that to be rid of wrappers.
    """
    original = module.forward

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    functools.update_wrapper(forward, original)
    signature = inspect.signature(original)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    vars(forward)["__signature__"] = signature.replace(parameters=[this, *signature.parameters.values()])
    del vars(forward)["__wrapped__"]
    module.forward = MethodType(forward, module)


def _refuse_tracing() -> None:
    """MisuseError if the engine would run under a compiler, or under a transform of torch.func.

    torch.compile, given the wrapped model or a part of it, would compile the engine's code. torch.func calls the model
    with tensors that stand for others, and would fail where weights are moved, so under some plans only. A backward may
    be transformed, as torch.autograd.grad(is_grads_batched=True) does.
    """
    if callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):  # it is while a frame is being compiled
        raise MisuseError(
            "torch.compile was given a model that protrain.wrap has wrapped, or a part of one, and would compile the "
            "transfers of its weights: leave torch.compile out, and pass compile=True to protrain.wrap, which compiles "
            "each block"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None and torch._C._current_graph_task_id() == -1:
        raise MisuseError(
            "a model that protrain.wrap has wrapped, or a part of one, was called inside a transform of torch.func "
            "(grad, vjp, jvp, vmap and the like), where its weights cannot be moved: use torch.autograd.grad or "
            "torch.autograd.functional, or a copy that was made before protrain.wrap"
        )


def _unit_call(engine: Engine, unit: Unit) -> Callable[..., Any]:
    """The ``__call__`` of a unit's module, with the parameters on the device for hooks and for a forward of the user.

    All tensors that a forward saves which replaced the engine's stay on the device.
    """
    module, forward, original = unit.module, unit.module.forward, unit.module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        _refuse_tracing()
        with span(GPU, f"forward {unit.label}"):
            if module._forward_pre_hooks or module._forward_hooks or module.forward is not forward:
                return engine.visits.run(unit, original, True, *args, **kwargs)
            return original(*args, **kwargs)

    return call


def _with_plain_parameters(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, during which managed parameters of ``module`` have the class nn.Parameter.

    The compiler's guards compare classes, and the graph was compiled for ordinary parameters when the model was
    profiled.
    """
    managed: list[Any] = [parameter for parameter in module.parameters() if isinstance(parameter, PresentParameter)]

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        for parameter in managed:
            parameter.__class__ = nn.Parameter
        try:
            return function(*args, **kwargs)
        finally:
            for parameter in managed:
                parameter.__class__ = PresentParameter

    return run


class _Root:
    """The model's own forward: it moves inputs to the device and begins the schedule of fetches.

    A script may replace the model's forward after wrapping, as TRL does for a fused head. Then the call of the model
    does both.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._model = model = engine.model
        self._original = model.forward
        # Parameters that may be passed by position.
        kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [name for name, p in inspect.signature(self._original).parameters.items() if p.kind in kinds]
        self._planned_batch = PlannedBatch(engine.profile, engine.plan, model, engine.memory, names)
        self._training_arguments = batches.training_arguments(model, {})  # those that a training adds to the batch's
        self._switches = checkpointing_switches(model)
        self._processes = announced_processes()
        self._recompute_together = engine.memory.ranks.several and any(b.collective for b in engine.profile.blocks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a forward of the model, and run it."""
        args, kwargs = self._begin(args, kwargs)
        self._engine.in_forward = True
        try:
            return self._original(*args, **kwargs)
        finally:
            self._engine.in_forward = False

    def watch_calls(self) -> None:
        """Let a call of the model begin a forward, even if a script has replaced ``model.forward``."""
        model, forward, original = self._model, self._model.forward, self._model._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if model.forward is not forward:
                    args, kwargs = self._begin(args, kwargs)
                return original(*args, **kwargs)
            except BaseException as error:  # no context manager, as forwards recurse and tracebacks are read
                self._engine.memory.ranks.raised(error, "a forward")
                raise

        vars(model)["_call_impl"] = call

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a forward of the model. Returns the arguments with which it runs: on the device, and in its type."""
        _refuse_tracing()
        engine = self._engine
        refuse_others(engine.memory.ranks, self._processes)
        args, kwargs = engine.inputs.to_device((args, kwargs))
        args, kwargs = batches.cast_inputs(args, kwargs, engine.memory.dtype)
        if not torch.is_grad_enabled():
            engine.begin_forward()
            return args, kwargs
        switch_off_checkpointing(self._switches, warn=True)
        kwargs = {**self._training_arguments, **kwargs}
        recompute = self._planned_batch.must_recompute(args, kwargs)
        engine.begin_forward()
        if self._recompute_together:  # a second run of a block begins its collectives again, on all ranks or none
            recompute = any(engine.memory.ranks.all_values(recompute, "the question whether blocks are recomputed"))
        engine.recompute_all = recompute
        return args, kwargs
