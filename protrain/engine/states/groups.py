"""The optimizer's groups: their parameters are the user's lists and must stay as they were wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.states.chunks import Member

_FORBIDDEN = ("amsgrad", "maximize", "differentiable")


def check_options(groups: Iterable[dict[str, Any]]) -> None:
    """ValueError for an option that changes the step, and that ProTrain does not carry out."""
    name = next((name for group in groups for name in _FORBIDDEN if group.get(name)), None)
    if name is not None:
        raise ValueError(f"{name}=True of Adam and AdamW is not supported: pass {name}=False")


class Groups:
    """Notices that a parameter was added to a group, taken out, or moved: its chunk has room and states for one."""

    def __init__(self, groups: Sequence[dict[str, Any]], members: Sequence[Member]) -> None:
        self._known = [list(group["params"]) for group in groups]
        self._names = {id(member.parameter): member.name for member in members}

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """MisuseError that names the first one. What else a group has may change at any time."""
        found = [group["params"] for group in groups]
        # Looked at in every step, so in as few steps of Python as there are groups.
        if len(found) == len(self._known) and all(
            len(now) == len(known) and all(map(is_, now, known)) for now, known in zip(found, self._known, strict=True)
        ):
            return
        now, known = _places(found), _places(self._known)
        for key, (index, parameter) in now.items():
            if key not in known:
                raise MisuseError(
                    f"group {index} of optimizer.param_groups has {self._name(parameter)}, which was in none when the "
                    "model was wrapped: make the optimizer with all groups before protrain.wrap"
                )
        for key, (index, parameter) in known.items():
            if key not in now:
                raise MisuseError(
                    f"{self._name(parameter)} was taken out of group {index} of optimizer.param_groups after "
                    "protrain.wrap: put it back, and call its requires_grad_(False) to stop training it"
                )
            if now[key][0] != index:
                raise MisuseError(
                    f"{self._name(parameter)} was moved from group {index} of optimizer.param_groups to group "
                    f"{now[key][0]} after protrain.wrap: put it back, and make groups before protrain.wrap"
                )
        if len(found) != len(self._known):
            raise MisuseError(
                f"optimizer.param_groups has {len(found)} groups, but had {len(self._known)} when the model was "
                "wrapped: make the optimizer with all groups before protrain.wrap"
            )
        self._known = [list(parameters) for parameters in found]  # in another order

    def names(self, groups: Sequence[dict[str, Any]]) -> list[list[str]]:
        """Names of the parameters of each group, without those that are none of the model's."""
        return [[self._names[id(p)] for p in group["params"] if id(p) in self._names] for group in groups]

    def check_names(self, groups: Sequence[dict[str, Any]], saved: Sequence[Iterable[str]]) -> None:
        """ValueError where a parameter has another group in ``saved``, whose options would become those of others.

        One that was in no group, or is in none now, has no options to mix up.
        """
        before = {name: index for index, names in enumerate(saved) for name in names}
        for index, names in enumerate(self.names(groups)):
            for name in names:
                if before.get(name, index) != index:
                    raise ValueError(
                        f"{name} is in group {before[name]} of its param_groups, and in group {index} here: make the "
                        "optimizer with the groups of the save, in their order"
                    )

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")


def _places(groups: Sequence[Sequence[Tensor]]) -> dict[int, tuple[int, Tensor]]:
    return {id(parameter): (index, parameter) for index, group in enumerate(groups) for parameter in group}
