"""The optimizer states of single parameters, as tensors on the CPU. Callers are inside ``engine.quiet()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protrain.engine.states.chunks import Member
from protrain.engine.states.values import (
    own_elements,
    read_own_master,
    read_own_state,
    read_own_weight,
    whole,
    write_master,
    write_state,
    write_weight,
)

_STATES = ("exp_avg", "exp_avg_sq")
_EXPORTED_BYTES = 12  # of one element: master and two moments in fp32


@dataclass(frozen=True)
class Part:
    """What one rank has of a parameter: a run of its elements, in the order of a contiguous tensor.

    Args:
        shape: of the whole parameter.
        elements: the run.
        tensors: copies of its states on the CPU. They have the shape of the parameter if the run is all of it, and are
            1-d otherwise. A frozen parameter has ``weight``, and any other ``master``, ``exp_avg`` and ``exp_avg_sq``
            (fp32) and ``step`` (0-d).
    """

    shape: torch.Size
    elements: slice
    tensors: dict[str, Tensor]

    @property
    def is_whole(self) -> bool:
        """Whether the run is all of the parameter."""
        return self.elements == slice(0, self.shape.numel())


def export_part(member: Member) -> Part:
    """Copies of what this rank has of ``member``. Other ranks need not call it."""
    if member.group < 0:
        tensors = {"weight": read_own_weight(member)}
    else:
        own = _own_state(member)
        tensors = {"master": own["master"] if "master" in own else read_own_master(member), **own}
    part = Part(member.shape, own_elements(member), tensors)
    if part.is_whole:
        tensors |= {kind: value.view(member.shape) for kind, value in tensors.items() if kind != "step"}
    return part


def part_bytes(member: Member) -> int:
    """The host memory that ``export_part`` takes."""
    own = own_elements(member)
    return (own.stop - own.start) * (member.chunk.weight.itemsize if member.group < 0 else _EXPORTED_BYTES)


def export_parameter(member: Member) -> dict[str, Tensor]:
    """The tensors of ``export_part`` for the whole parameter. All ranks must call it."""
    return _whole(member, export_part(member).tensors)


def import_part(member: Member, elements: slice, tensors: Mapping[str, Tensor]) -> None:
    """Set ``elements`` of ``member`` to ``tensors``, which have the names of those of a ``Part``."""
    if "weight" in tensors:
        write_weight(member, tensors["weight"], elements)
    elif member.group < 0:  # it was trainable when it was saved
        write_weight(member, tensors["master"], elements)
    if member.group >= 0:
        import_state(member, tensors, elements)


def export_state(member: Member) -> dict[str, Any]:
    """Copies of all states of ``member`` in the format of torch.optim.AdamW, and of the ``master`` if there is one.

    With the master comes ``master_step``, the step at which it was exported. Other optimizers keep the master in their
    state but do not update it. When their state is loaded here, the old master must not replace the weight that they
    have trained. The step is no tensor, as other optimizers cast tensors. All ranks must call it.
    """
    state = _whole(member, _own_state(member))
    return {**state, "master_step": member.steps} if "master" in state else {**state}


def import_state(member: Member, tensors: Mapping[str, Any], elements: slice | None = None) -> None:
    """Set the states that ``export_state`` returned. States that are missing become those of an untrained model.

    ``elements`` are those that ``tensors`` have. None: all of them.
    """
    member.steps = int(tensors.get("step", 0))
    for name in _STATES:
        write_state(member, name, tensors.get(name, 0.0), elements)
    if "master" in tensors and tensors.get("master_step", member.steps) == member.steps:
        write_master(member, tensors["master"], elements)


def check_shapes(name: str, shape: torch.Size, tensors: Mapping[str, Any]) -> None:
    """ValueError if ``tensors`` are not states of the parameter ``name``, which has ``shape``."""
    for kind in ("master", "weight", *_STATES):
        if kind in tensors and tuple(tensors[kind].shape) != tuple(shape):
            raise ValueError(
                f"{kind} of {name} has shape {tuple(tensors[kind].shape)}, the model's is "
                f"{tuple(shape)}: load a state of the same model"
            )


def _own_state(member: Member) -> dict[str, Tensor]:
    """``export_state`` of what this rank has: 1-d."""
    state = {"step": torch.tensor(float(member.steps), device="cpu")}
    state |= {name: read_own_state(member, name) for name in _STATES}
    if member.chunk.master is not None:
        state["master"] = read_own_master(member)
    return state


def _whole(member: Member, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value if name == "step" else whole(member, value) for name, value in tensors.items()}
