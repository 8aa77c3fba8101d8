"""The state of an optimizer: in torch's format, what stands for it in chunks, and what waits before there are any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

from torch import nn

from protrain.common.errors import MisuseError
from protrain.engine.states import parameter_state
from protrain.engine.weights.parameter import PendingLoad, pending_error


class StatesInChunks(defaultdict[Any, Any]):
    """What ``optimizer.state`` is: not the states, which lie in chunks, but an error for whoever looks for them there.

    An empty dictionary would let a script that resets or reads moments do nothing.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise MisuseError(
            "optimizer.state does not hold the states of parameters, which ProTrain keeps in chunks: read them with "
            "optimizer.state_dict(), and set them with optimizer.load_state_dict(), where parameters without an entry "
            "in 'state' begin anew. protrain.save_checkpoint and `protrain convert` write files of them"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = __reduce_ex__ = _refuse
    get = items = keys = values = pop = popitem = clear = update = setdefault = copy = _refuse


def match_state(
    groups: list[dict[str, Any]], parameters: Mapping[str, nn.Parameter], state_dict: dict[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The states in ``state_dict`` of trainable ``parameters``, by name.

    Raises:
        ValueError: the groups or shapes are those of another model, or the states those of another optimizer.
    """
    saved = state_dict["param_groups"]
    numbers = {number for group in saved for number in group["params"]}
    unknown = [number for number in state_dict["state"] if number not in numbers]
    if unknown:
        raise ValueError(
            f"the optimizer state has an entry {unknown[0]!r}, which is none of the parameters in its groups: load "
            "what state_dict() returned, where the keys of 'state' are numbers"
        )
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        raise ValueError(
            f"the optimizer state has groups of {[len(group['params']) for group in saved]} parameters, this "
            f"optimizer of {[len(group['params']) for group in groups]}: load a state of the same model"
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Mapping[str, Any]] = {}
    for group, other in zip(groups, saved, strict=True):
        for parameter, number in zip(group["params"], other["params"], strict=True):
            if id(parameter) in names:
                name = names[id(parameter)]
                found[name] = state_dict["state"].get(number, {})
                parameter_state.check_state(name, parameter.shape, found[name])
    return found


class FirstCall:
    """What waits for the first call of a model that was wrapped without an example batch.

    Args:
        parameters: all managed parameters by name, as they are when the model is wrapped.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._required = {parameter: parameter.requires_grad for parameter in parameters.values()}
        self._actions: list[Callable[[], None]] = []
        self._load: PendingLoad | None = None  # by one of these

    def add(self, action: Callable[[], None], *, loads: nn.Module | None) -> None:
        """Do ``action`` in the first call. If it loads the model ``loads``, nobody may use its states until then."""
        if loads is not None and self._load is None:
            self._load = PendingLoad(loads, self._parameters)
        self._actions.append(action)

    def refuse_pending_load(self, what: str) -> None:
        """MisuseError if ``what`` would use states that are yet to be loaded."""
        if self._load is not None:
            raise pending_error(what)

    @contextmanager
    def begins(self) -> Iterator[None]:
        """A context in which parameters are ordinary ones, and require gradients as when the model was wrapped.

        So a parameter that a script freezes for the first steps has states, and can be trained later. One that was
        frozen then, and is to be trained now, is an error of the forward that follows.
        """
        now = {parameter: parameter.requires_grad for parameter in self._required}
        with nullcontext() if self._load is None else self._load.undone():
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
        self._load = None
