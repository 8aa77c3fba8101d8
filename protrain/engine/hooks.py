"""What wrapping does to the user's model: forwards replaced on the instances, hooks on parameters, nothing else.

The model stays the same object. A unit's ``forward`` becomes a bound run of the engine around the original; the
model's own ``forward`` also brings inputs to the device. ``functools.wraps`` keeps signatures, which libraries inspect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from protrain import batch as batches
from protrain.compilation import CompiledForward
from protrain.engine.engine import Engine
from protrain.engine.parameter import Handle, PresentParameter, manage, release
from protrain.engine.units import Unit
from protrain.errors import MisuseError


def install(engine: Engine) -> None:
    """Hook the engine into its model."""
    for member in engine.members:
        handle = Handle(member.name, member.index, engine, trainable=member.parameter.requires_grad)
        if member.parameter.requires_grad:
            member.parameter.register_post_accumulate_grad_hook(_gradient_hook(handle))
        manage(member.parameter, handle)
        if not member.chunk.persistent:
            release(member.parameter, engine.placeholder)
    for unit in engine.units:
        unit.module.forward = _unit_forward(engine, unit)
    engine.model.forward = _root_forward(engine)


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
    planned = engine.profile.batch_shapes
    extra = batches.training_arguments(model, {})

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = batches.to_device((args, kwargs), engine.device)
        args, kwargs = batches.cast_inputs(args, kwargs, engine.dtype)
        if torch.is_grad_enabled():
            kwargs = {**extra, **kwargs}
            _refuse_larger(planned, engine.profile.tokens, args, kwargs)
        engine.begin_forward()
        return original(*args, **kwargs)

    return forward


def _refuse_larger(planned: dict[str, tuple[int, ...]], tokens: int, args: Any, kwargs: Any) -> None:
    """MisuseError when a training batch is larger than the plan was made for: an OOM later would be worse."""
    given = dict(kwargs) | {str(at): value for at, value in enumerate(args)}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        limit = planned.get(name)
        count = 1
        for size in limit or ():
            count *= size
        if limit is not None and value.numel() > count:
            raise MisuseError(
                f"{name} has shape {tuple(value.shape)}, larger than the {limit} that the plan was made for: pass the "
                "largest batch of the training as example_batch to protrain.wrap"
            )
    whole = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if whole and not any(name in planned for name in whole) and batches.tokens(whole) > tokens:
        raise MisuseError(
            f"the batch has {batches.tokens(whole)} tokens, more than the {tokens} that the plan was made for: pass "
            "the largest batch of the training as example_batch to protrain.wrap"
        )
