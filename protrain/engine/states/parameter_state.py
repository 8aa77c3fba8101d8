"""The optimizer states of single parameters, as tensors on the CPU. Callers are inside ``engine.quiet()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from protrain.engine.states.chunks import Member
from protrain.engine.states.values import read_master, read_state, write_master, write_state

_STATES = ("exp_avg", "exp_avg_sq")


def export_state(member: Member, steps: list[int]) -> dict[str, Tensor]:
    """Copies of all states of ``member`` in the format of torch.optim.AdamW, and of the ``master`` if there is one.

    ``steps`` is the number of steps of each parameter.
    """
    state = {"step": torch.tensor(float(steps[member.index]), device="cpu")}
    state |= {name: read_state(member, name) for name in _STATES}
    if member.chunk.master is not None:
        state["master"] = read_master(member)
    return state


def with_master_step(state: dict[str, Tensor]) -> dict[str, Any]:
    """``state`` of :func:`export_state`, with the step at which the master was exported, if there is one.

    Other optimizers keep the master in their state but do not update it. When their state is loaded here, the old
    master must not replace the weight that they have trained. The step is no tensor, as other optimizers cast tensors.
    """
    return {**state, "master_step": int(state["step"])} if "master" in state else dict(state)


def import_state(member: Member, steps: list[int], tensors: Mapping[str, Any]) -> None:
    """Set the states that :func:`export_state` returned. States that are missing become those of an untrained model."""
    steps[member.index] = int(tensors.get("step", 0))
    for name in _STATES:
        write_state(member, name, tensors.get(name, 0.0))
    if "master" in tensors and tensors.get("master_step", steps[member.index]) == steps[member.index]:
        write_master(member, tensors["master"])


def check_shapes(name: str, shape: torch.Size, tensors: Mapping[str, Any]) -> None:
    """ValueError if ``tensors`` are not states of the parameter ``name``, which has ``shape``."""
    for kind in ("master", "weight", *_STATES):
        if kind in tensors and tuple(tensors[kind].shape) != tuple(shape):
            raise ValueError(
                f"{kind} of {name} has shape {tuple(tensors[kind].shape)}, the model's is "
                f"{tuple(shape)}: load a state of the same model"
            )
