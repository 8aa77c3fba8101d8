"""Finds values of managed parameters that were changed where the engine does not see it.

[Note: edits] A write into a weight on the device changes neither its master nor its copy in host memory. So values may
be edited inside ``full_parameters`` only, and every other edit is an error. If the data of a parameter was replaced,
the address of its storage differs. If it was changed in place, its version counter differs, which autograd keeps. The
engine never touches that counter, because its kernels write to chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from protrain.engine.states.chunks import Member
from protrain.engine.states.values import write_master
from protrain.engine.weights.parameter import same_bits, set_data


def find_edited(members: Iterable[Member]) -> list[Member]:
    """The ``members`` whose data was replaced or changed in place while a unit used them."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            member
            for member in members
            if member.parameter._version != member.edits or member.parameter.data_ptr() != member.address
        ]


def undo_edit(member: Member, weight: Tensor) -> str | None:
    """Let the parameter of ``member`` be ``weight`` again. Returns how it was edited: "replaced", "changed in place".

    None: its storage was replaced by one with the same values, as recurrent modules do (``flatten_parameters``). Values
    that were changed in place stay in ``weight``.
    """
    with torch._C.DisableTorchFunctionSubclass():
        how = None if member.parameter._version == member.edits else "changed in place"
        if member.parameter.data_ptr() != member.address:
            how = None if _has_values_of(member, weight) else "replaced"
            set_data(member.parameter, weight)
        member.edits = member.parameter._version
    return how


def keep_edit(member: Member) -> None:
    """The weight of ``member`` was changed in place for good: a master that does not belong to it can be NaN."""
    if member.chunk.master is not None:
        write_master(member, member.view(member.chunk.weight))
    member.chunk.version += 1


def _has_values_of(member: Member, weight: Tensor) -> bool:
    """Whether a parameter whose storage was replaced has the same values as ``weight``."""
    found = member.parameter.detach()
    same_kind = (found.dtype, found.shape) == (weight.dtype, weight.shape)
    return same_kind and same_bits(found.to(weight.device), weight)
