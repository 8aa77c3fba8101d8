"""Notices parameters that a script adds to a model after ``protrain.wrap``, which no update would reach."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any, cast

from torch import nn

from protrain.common.errors import MisuseError


class AddedParameters:
    """The parameters of ``model`` that it did not have when this object was made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        self._frozen: list[nn.Parameter] = []  # those that were added and require no gradient
        self._note_modules()

    def _note_modules(self) -> None:
        self._tables = [
            cast(dict[str, Any], table)
            for module in self._model.modules()
            for table in (module._modules, module._parameters)
        ]
        self._held = self._holdings()

    def _holdings(self) -> list[Any]:
        """What modules hold. A parameter that was added, alone or in a module, changes it."""
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def refuse(self) -> None:
        """Raise a MisuseError that names an added parameter that requires a gradient. Frozen ones may be added.

        A forward is no place for it: ``torch.func.functional_call`` puts other parameters into the model meanwhile.
        """
        held = self._holdings()  # every step does this, so it must be fast
        unchanged = len(held) == len(self._held) and all(map(is_, held, self._held))
        if unchanged and not any(parameter.requires_grad for parameter in self._frozen):
            return
        added = {name: p for name, p in self._model.named_parameters() if id(p) not in self._known}
        for name, parameter in added.items():
            if parameter.requires_grad:
                raise MisuseError(
                    f"{name} was added to the model after protrain.wrap, so it has no memory in the plan and no "
                    "optimizer states, and would not be trained: add it before protrain.wrap, as with peft's "
                    "add_adapter, and give it to the optimizer. If it is not to be trained, call its "
                    "requires_grad_(False)"
                )
        self._frozen = list(added.values())
        self._note_modules()
