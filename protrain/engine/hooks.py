"""What wrapping does to the user's model: forwards replaced on the instances, hooks on parameters, nothing else.

The model stays the same object. A unit's ``forward`` becomes a bound run of the engine around the original; the
model's own ``forward`` also brings inputs to the device. ``functools.wraps`` keeps signatures, which libraries inspect.
Where a unit has hooks of the user's, the engine has its parameters there for them, too.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from protrain import batch as batches
from protrain.compilation import CompiledForward
from protrain.engine.activations.saved import Frame
from protrain.engine.engine import Engine
from protrain.engine.units import Unit
from protrain.engine.weights.parameter import Handle, PresentParameter, manage, release
from protrain.errors import MisuseError
from protrain.profiler.blocks import checkpointing_switches, refuse_own_checkpointing


def install(engine: Engine) -> None:
    """Hook the engine into its model."""
    for member in engine.members:
        handle = Handle(member.name, member.index, engine, trainable=member.parameter.requires_grad)
        if member.parameter.requires_grad:
            member.parameter.register_post_accumulate_grad_hook(_gradient_hook(handle))
        manage(member.parameter, handle)
        member.edits = member.parameter._version
        if not member.chunk.persistent:
            release(member.parameter, engine.placeholder)
    for unit in engine.units:
        unit.module.forward = _unit_forward(engine, unit)
    engine.model.forward = _root_forward(engine)
    for unit in engine.units:
        vars(unit.module)["_call_impl"] = _unit_call(engine, unit)


def _gradient_hook(handle: Handle) -> Callable[[Tensor], None]:
    return lambda parameter: handle.engine.gradient_ready(handle.index)


def _unit_forward(engine: Engine, unit: Unit) -> Callable[..., Any]:
    original = unit.module.forward
    if isinstance(original, CompiledForward):
        original = _with_plain_parameters(list(unit.module.parameters()), original)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return engine.run_unit(unit, original, args, kwargs)

    return forward


def _unit_call(engine: Engine, unit: Unit) -> Callable[..., Any]:
    """What calling the unit's module does: its forward with hooks, which have the unit's parameters, too."""
    module, forward, original = unit.module, unit.module.forward, unit.module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        replaced = module.forward is not forward
        if not (module._forward_pre_hooks or module._forward_hooks or replaced):
            return original(*args, **kwargs)
        before = unit.calls
        output = engine.run_around(unit, original, args, kwargs)
        if replaced and unit.calls == before and unit.frame_class is not Frame and torch.is_grad_enabled():
            warnings.warn(
                f"the forward of {unit.label} was replaced after protrain.wrap, so all that it saves stays on the "
                "device, for which the plan has no room: replace it before protrain.wrap",
                stacklevel=2,
            )
        return output

    return call


def _with_plain_parameters(parameters: list[nn.Parameter], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the managed ones among ``parameters`` in their ordinary class.

    The compiler's guards compare classes, and the graph was made for ordinary parameters when the model was profiled.
    """
    managed: list[Any] = [parameter for parameter in parameters if isinstance(parameter, PresentParameter)]

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


def _root_forward(engine: Engine) -> Callable[..., Any]:
    model = engine.model
    original = model.forward
    names = _positional_names(original)
    planned = {_by_keyword(name, names): shape for name, shape in engine.profile.batch_shapes.items()}
    # Recurrent and attention modules of torch say so when sequences come first.
    rows_first = all(getattr(module, "batch_first", True) for module in model.modules())
    extra = batches.training_arguments(model, {})
    switches = checkpointing_switches(model)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = engine.inputs.to_device((args, kwargs))
        args, kwargs = batches.cast_inputs(args, kwargs, engine.dtype)
        if torch.is_grad_enabled():
            refuse_own_checkpointing(model, switches, MisuseError, since="since protrain.wrap")
            kwargs = {**extra, **kwargs}
            given = {_by_keyword(str(at), names): value for at, value in enumerate(args)} | kwargs
            _refuse_larger(given, planned, engine.profile.tokens, rows_first=rows_first)
        engine.begin_forward()
        return original(*args, **kwargs)

    return forward


def _positional_names(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that may be passed by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds]


def _by_keyword(name: str, names: list[str]) -> str:
    """``name`` of an input, dotted where it is nested, with its keyword in place of its position."""
    position, dot, rest = name.partition(".")
    known = position.isdecimal() and int(position) < len(names)
    return (names[int(position)] if known else position) + dot + rest


def _refuse_larger(
    given: dict[str, Any], planned: dict[str, tuple[int, ...]], tokens: int, *, rows_first: bool
) -> None:
    """MisuseError when a training batch may need more than the plan was made for: an OOM later would be worse."""
    found = dict(batches.named_tensors(given))
    for name, value in found.items():
        how = batches.excess(tuple(value.shape), planned[name], rows_first=rows_first) if name in planned else ""
        if how:
            raise MisuseError(
                f"{name} has shape {tuple(value.shape)}, {how} than the {planned[name]} that the plan was made for: "
                "pass an example_batch to protrain.wrap that is as long in every dimension as any batch of the training"
            )
    if found and not any(name in planned for name in found) and batches.tokens(found) > tokens:
        raise MisuseError(
            f"the batch has {batches.tokens(found)} tokens, more than the {tokens} that the plan was made for: pass "
            "the largest batch of the training as example_batch to protrain.wrap"
        )
