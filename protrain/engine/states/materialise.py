"""Weights into chunks: from a model in memory, from safetensors, or at random straight from the meta device.

Whatever the source, one unit at a time is whole, never the model: a model that fits only when its states are spread
over device and host must never exist in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.engine.states.chunks import Member
from protrain.engine.states.load_weights import Write, load_weights
from protrain.engine.states.values import write_master, write_weight
from protrain.engine.weights.parameter import mark_moved
from protrain.parameters import is_managed


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, their buffers as usual.

    A model of any size is built in no memory; :func:`protrain.wrap` then initialises it by its own rules, or from
    ``weights``, straight into chunks.
    """
    constructor: Any = nn.Module
    original = constructor.register_parameter

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and is_managed(param) and not param.is_meta:
            param, given = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad), param
            _keep_hooks(param, given)
        original(module, name, param)

    constructor.register_parameter = register_parameter
    try:
        yield
    finally:
        constructor.register_parameter = original


def fill(
    members: list[Member],
    model: nn.Module,
    *,
    blocks: Collection[str],
    weights: str | Path | None,
    device: torch.device,
    show: Callable[[str, float], None],
) -> None:
    """Give every member its value, and free the parameter's own memory as soon as it is copied.

    ``show`` is told the name of each and the share of all elements that is there, as a large model takes minutes.

    Raises:
        ValueError: a weight file is missing or does not match, or a module on the meta device has no initialiser.
    """
    done, total = 0, sum(member.numel for member in members)

    def write(member: Member, value: Tensor) -> None:
        nonlocal done
        _write(member, value)
        done += member.numel
        show(member.name, done / total)

    def write_and_free(member: Member, value: Tensor) -> None:
        write(member, value)
        _drop(member)

    remaining = members if weights is None else load_weights(members, model, Path(weights), write_and_free)
    _initialise(model, {id(member.parameter): member for member in remaining}, blocks, device, write)
    for member in remaining:
        if not member.parameter.is_meta:
            write_and_free(member, member.parameter.data)
    for member in members:
        _drop(member)


def _write(member: Member, value: Tensor) -> None:
    if member.group < 0:
        write_weight(member, value)
    else:
        write_master(member, value)


def _drop(member: Member) -> None:
    """Let the parameter's own memory go; it gets its place in the chunk when the engine is installed."""
    parameter, weight = member.parameter, member.chunk.weight
    with torch.no_grad():
        if parameter.is_meta:  # a tensor cannot leave the meta device by assigning its data
            fresh = nn.Parameter(weight.new_empty(0), requires_grad=parameter.requires_grad)
            vars(fresh).update(vars(parameter))
            _keep_hooks(fresh, parameter)
            torch.utils.swap_tensors(parameter, fresh)
        mark_moved(parameter)
        parameter.data = weight.new_empty(()).expand(member.shape)


def _keep_hooks(target: Any, source: Any) -> None:
    """Hooks of ``source`` are those of ``target`` too; their handles remove them from both."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(source, kind)) is not None:
            setattr(target, kind, hooks)


def _initialise(
    model: nn.Module, by_parameter: dict[int, Member], blocks: Collection[str], device: torch.device, write: Write
) -> None:
    """Run the model's own initialisation for every parameter on the meta device, one outermost piece at a time."""
    done: set[int] = set()
    for module, initialise in _pieces(model, by_parameter, blocks):
        own = {id(p): p for p in module.parameters() if p.is_meta and id(p) in by_parameter and id(p) not in done}
        if not own:
            continue
        holders = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and id(parameter) in own
        ]
        real = {
            key: nn.Parameter(torch.full(p.shape, float("nan"), dtype=p.dtype, device=device), requires_grad=False)
            for key, p in own.items()
        }
        for owner, name, parameter in holders:
            owner._parameters[name] = real[id(parameter)]
        try:
            with torch.no_grad():
                initialise(module)
        finally:
            for owner, name, parameter in holders:
                owner._parameters[name] = parameter
        for key, value in real.items():
            member = by_parameter[key]
            if torch.isnan(value).any():
                raise ValueError(
                    f"cannot initialise {member.name}: {type(module).__name__} has neither reset_parameters nor an "
                    "_init_weights that sets it; build the model outside protrain.empty_parameters() or pass weights="
                )
            write(member, value.data)
        done.update(own)


def _pieces(
    model: nn.Module, by_parameter: dict[int, Member], blocks: Collection[str]
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Modules to initialise in one go, children first, each with the rule that applies to it.

    Rules of parents may set parameters of their children (GPT-2 scales residual projections), so blocks are pieces as a
    whole; outside blocks every module with parameters of its own is a piece.
    """

    def visit(module: nn.Module, name: str, rule: Callable[[nn.Module], None]) -> Iterator[Any]:
        rule = getattr(module, "_init_weights", rule)
        if name in blocks:
            yield module, lambda piece, rule=rule: piece.apply(rule)
            return
        for child_name, child in module.named_children():
            yield from visit(child, f"{name}.{child_name}" if name else child_name, rule)
        if any(id(parameter) in by_parameter for parameter in module.parameters(recurse=False)):
            yield module, rule

    yield from visit(model, "", _reset_parameters)


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
