"""Torch's optimizers beside ProTrain's own: which kinds ``wrap`` accepts, and what they refuse once it has begun."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from protrain.common.errors import MisuseError
from protrain.engine.states.groups import check_options
from protrain.engine.weights.parameter import PresentParameter
from protrain.optim.parameter_states import ParameterStates

_SUPPORTED = torch.optim.Adam, torch.optim.AdamW
_retired: WeakSet[torch.optim.Optimizer] = WeakSet()  # those that wrap was given


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError unless ``optimizer`` is a plain torch Adam or AdamW."""
    if isinstance(inner := getattr(optimizer, "optimizer", None), _SUPPORTED):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__} around {type(inner).__name__}: call protrain.wrap first, and "
            "give what it returns to whatever prepares model and optimizer (accelerator.prepare, fabric.setup)"
        )
    if type(optimizer) not in _SUPPORTED:
        kind = type(optimizer)
        raise ValueError(
            f"optimizer must be torch.optim.AdamW or torch.optim.Adam, not {kind.__name__} of {kind.__module__}: "
            "ProTrain carries out the update itself and supports these two"
        )
    check_options(optimizer.param_groups)


def retire(optimizer: torch.optim.Optimizer) -> None:
    """Make the wrapped ``optimizer`` raise an error where it would now silently do nothing or save nothing.

    Its param_groups stay live, and schedulers that were made with it keep working.
    """
    for name in ("zero_grad", "state_dict", "load_state_dict"):
        vars(optimizer)[name] = _refused(name)
    vars(optimizer)["add_param_group"] = refuse_group
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
    if isinstance(optimizer, ParameterStates):
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


def refuse_group(_: dict[str, Any]) -> None:
    """Raise a MisuseError, because parameter groups are fixed by wrapping."""
    raise MisuseError("parameters cannot be added after protrain.wrap: make the optimizer with all groups first")
