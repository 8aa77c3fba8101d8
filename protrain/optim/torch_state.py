"""The optimizer's state in the format of torch.optim.AdamW, in which parameters have numbers instead of names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protrain.engine.states.chunks import Member
from protrain.engine.states.parameter_state import check_shapes, export_state, with_master_step

Groups = list[dict[str, Any]]


def pack_state(groups: Groups, members: Iterable[Member], steps: list[int]) -> dict[str, Any]:
    """The state of the trainable ``members``, of which ``steps`` says how many steps each has made."""
    numbers = {id(p): number for number, p in enumerate(p for group in groups for p in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for member in members:
        # Before its first step a parameter has state to keep only if it has a master.
        if steps[member.index] or member.chunk.master is not None:
            state[numbers[id(member.parameter)]] = with_master_step(export_state(member, steps))
    packed = []
    for group in groups:
        own = {key: value for key, value in group.items() if key != "params"}
        packed.append({**own, "params": [numbers[id(parameter)] for parameter in group["params"]]})
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def match_state(
    groups: Groups, members: Iterable[Member], state_dict: dict[str, Any]
) -> list[tuple[Member, dict[str, Any]]]:
    """Pair each of the trainable ``members`` with its state in ``state_dict``.

    Raises:
        ValueError: the groups or shapes are those of another model.
    """
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        raise ValueError(
            f"the optimizer state has groups of {[len(group['params']) for group in saved]} parameters, this "
            f"optimizer of {[len(group['params']) for group in groups]}: load a state of the same model"
        )
    by_parameter = {id(member.parameter): member for member in members}
    found = []
    for group, other in zip(groups, saved, strict=True):
        for parameter, number in zip(group["params"], other["params"], strict=True):
            member = by_parameter.get(id(parameter))
            if member is not None:
                tensors = state_dict["state"].get(number, {})
                check_shapes(member, tensors)
                found.append((member, tensors))
    return found
