"""The groups of the user's optimizer: hyperparameters, and the parameters that have them.

Hyperparameters are read at every step, so that every scheduler works. The lists of parameters must stay as they were
when the model was wrapped, as a chunk has memory and states for the parameters that were trained then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.common.parameters import is_managed
from protrain_kernels import AdamScalars, adam_scalars

_adam_scalars = functools.lru_cache(maxsize=4)(adam_scalars)  # chunk after chunk asks for the same
_FORBIDDEN = ("amsgrad", "maximize", "differentiable")


def check_options(groups: Iterable[dict[str, Any]]) -> None:
    """ValueError if a group has an option that would change the step and that ProTrain does not support."""
    name = next((name for group in groups for name in _FORBIDDEN if group.get(name)), None)
    if name is not None:
        raise ValueError(f"{name}=True of Adam and AdamW is not supported: pass {name}=False")


class Groups:
    """The live groups of ``optimizer``.

    Args:
        optimizer: whose list of groups may be replaced.
        names: of all managed parameters, by their id.
        decoupled: the weight decay is that of AdamW, whatever the groups say.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, decoupled: bool) -> None:
        self._optimizer = optimizer
        self._decoupled = decoupled
        self._known = [list(group["params"]) for group in self._live]
        self._names = names
        self.no_sync = False  # the script is inside model.no_sync(), where backwards only accumulate

    @property
    def _live(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def check(self) -> None:
        """Raise an error for whatever a step would refuse, before anything is updated.

        Raises:
            MisuseError: a group has other parameters than it had.
            ValueError: a hyperparameter is invalid.
        """
        self.check_members()
        check_options(self._live)  # they may have been set or loaded since wrapping
        self.all_scalars()

    def all_scalars(self) -> list[AdamScalars]:
        """The hyperparameters of all groups in a first step. ValueError for an invalid one."""
        return [self.scalars(index, 1) for index in range(len(self._live))]

    def options(self) -> list[dict[str, Any]]:
        """The hyperparameters of all groups, as ``adam_scalars`` takes them."""
        return [self._options(group) for group in self._live]

    def scalars(self, index: int, step: int) -> AdamScalars:
        """The hyperparameters of group ``index`` for parameters that make step number ``step``, from 1."""
        return _adam_scalars(**self._options(self._live[index]), step=step)

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": self._decoupled or bool(group.get("decoupled_weight_decay")),
        }

    def check_members(self) -> None:
        """MisuseError that names a parameter that was added to a group, removed, or moved to another group.

        Everything else in a group may change at any time.
        """
        found = [group["params"] for group in self._live]
        # Every step runs this, so the work in Python must not grow with the number of parameters.
        if len(found) == len(self._known) and all(
            len(now) == len(known) and all(map(is_, now, known)) for now, known in zip(found, self._known, strict=True)
        ):
            return
        now, before = ({id(p): at for at, group in enumerate(groups) for p in group} for groups in (found, self._known))
        for parameter in chain(*self._known, *found):
            places = [groups.get(id(parameter)) for groups in (now, before)]
            if places[0] != places[1]:
                here, there = ("no group" if place is None else f"group {place}" for place in places)
                name = self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                raise MisuseError(
                    f"{name} is in {here} of optimizer.param_groups, and was in {there} when the model was wrapped: "
                    "make the optimizer with all groups before protrain.wrap, and leave every parameter in its group. "
                    "To stop training one, call its requires_grad_(False)"
                )
        self._known = [list(parameters) for parameters in found]  # they have another order

    def refuse_changed(self, model: nn.Module) -> None:
        """MisuseError if ``model`` no longer has the parameters with which it was wrapped, by their names."""
        now = {id(parameter): name for name, parameter in model.named_parameters() if is_managed(parameter)}
        if changed := now.items() ^ self._names.items():
            raise MisuseError(
                f"{min(changed)[1]} was added, removed, renamed or replaced between protrain.wrap and the first call "
                "of the model, and no save would have it: change the model before protrain.wrap"
            )

    def state(self) -> dict[str, Any]:
        """The options of each group, and the names of its parameters that the model has, as JSON values."""
        return {
            "param_groups": [{key: group[key] for key in group if key != "params"} for group in self._live],
            "parameters": self._parameters(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError if groups cannot have the options in ``state``, or parameters would get those of another group.

        A parameter that is in no group, now or in ``state``, has no options and is not checked.
        """
        options = state["param_groups"]
        if len(options) != len(self._live):
            raise ValueError(f"the state has {len(options)} parameter groups, this optimizer {len(self._live)}")
        check_options(options)
        before = {name: index for index, names in enumerate(state["parameters"]) for name in names}
        for index, names in enumerate(self._parameters()):
            for name in names:
                if before.get(name, index) != index:
                    raise ValueError(
                        f"{name} is in group {before[name]} of its param_groups, and in group {index} here: make the "
                        "optimizer with the groups of the save, in their order"
                    )

    def _parameters(self) -> list[list[str]]:
        return [[self._names[id(p)] for p in group["params"] if id(p) in self._names] for group in self._live]
