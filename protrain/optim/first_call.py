"""The first call of a model that was wrapped without an example batch: it plans the training, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from protrain.common import batch as batches
from protrain.common.errors import MisuseError
from protrain.engine.weights.parameter import Awaited, awaited_error


class FirstCall:
    """What waits for the first call.

    Args:
        parameters: all managed parameters by name, as they are when the model is wrapped.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._required = {parameter: parameter.requires_grad for parameter in parameters.values()}
        self._actions: list[Callable[[], None]] = []
        self._awaited: Awaited | None = None  # what is loaded by one of these

    def add(self, action: Callable[[], None], *, loads: nn.Module | None) -> None:
        """Do ``action`` in the first call. If it loads the model ``loads``, nobody may use its states until then."""
        if loads is not None and self._awaited is None:
            self._awaited = Awaited(loads, self._parameters)
        self._actions.append(action)

    def refuse_awaited(self, what: str) -> None:
        """MisuseError if ``what`` would use states that are yet to be loaded."""
        if self._awaited is not None:
            raise awaited_error(what)

    @contextmanager
    def begins(self) -> Iterator[None]:
        """A context in which parameters are ordinary ones, and require gradients as when the model was wrapped.

        So a parameter that a script freezes for the first steps has states, and can be trained later. One that was
        frozen then, and is to be trained now, is an error of the forward that follows.
        """
        now = {parameter: parameter.requires_grad for parameter in self._required}
        with nullcontext() if self._awaited is None else self._awaited.given_back():
            for parameter, requires in self._required.items():
                parameter.requires_grad = requires
            try:
                yield
            finally:
                for parameter, requires in now.items():
                    parameter.requires_grad = requires

    def carry_out(self) -> None:
        """Do what has waited."""
        for action in self._actions:
            action()
        self._actions.clear()
        self._awaited = None


def plan_at_first_call(model: nn.Module, begin: Callable[[Any], None]) -> None:
    """Let the first call of ``model`` call ``begin`` with its arguments as a batch. If that raises, the next call does.

    Raises:
        MisuseError: the call is not one of the training.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            raise MisuseError(
                "the first call of a model that was wrapped without an example_batch plans the training, so it must be "
                "a call of the training and not under torch.no_grad(): pass example_batch to protrain.wrap to evaluate "
                "or generate first"
            )
        for name in waiting:
            del vars(model)[name]
        try:
            begin(batches.of_call(model, args, kwargs))
        except BaseException:
            vars(model).update(waiting)
            raise
        return model(*args, **kwargs)

    def refuse_copy(_: dict[int, Any]) -> Any:
        raise MisuseError("a wrapped model cannot be copied: copy it before protrain.wrap, or copy its state_dict()")

    waiting = {"_call_impl": call, "__deepcopy__": refuse_copy}
    vars(model).update(waiting)
