"""The torch optimizer that the user gives to ``wrap``: which kinds are accepted, and what it refuses afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from protrain.common.errors import MisuseError
from protrain.engine.states.groups import check_options

_SUPPORTED = torch.optim.Adam, torch.optim.AdamW


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

    def refused(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise MisuseError(
                f"{name}() of the optimizer that protrain.wrap was given does not work any more, as its gradients and "
                "its state have moved: use the optimizer that it returned"
            )

        return refuse

    for name in ("zero_grad", "state_dict", "load_state_dict"):
        vars(optimizer)[name] = refused(name)
    vars(optimizer)["add_param_group"] = refuse_group
    refuse = refused("step")
    # step is not replaced as an attribute, because schedulers replace it and warn if someone else did. The optimizer
    # that wrap returns shares this hook, and may step.
    optimizer.register_step_pre_hook(lambda caller, *_: refuse() if type(caller) in _SUPPORTED else None)


def refuse_group(_: dict[str, Any]) -> None:
    """Raise a MisuseError, because parameter groups are fixed by wrapping."""
    raise MisuseError("parameters cannot be added after protrain.wrap: make the optimizer with all groups first")
