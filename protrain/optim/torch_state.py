"""The state of an optimizer in the format of ``torch.optim``, and what stands for it where it is not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from protrain.common.errors import MisuseError
from protrain.engine.states import parameter_state


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
