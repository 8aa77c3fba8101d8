"""Finds values of managed parameters that were changed where the engine does not see it.

[Note: edits] A write into a weight on the device changes neither its master nor its copy in host memory. So values may
be edited inside ``full_parameters`` only, and every other edit is an error. If the data of a parameter was replaced,
the address of its storage differs. If it was changed in place, its version counter differs, which autograd keeps. The
engine never touches that counter, because its kernels write to chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from protrain.engine.states.chunks import Member
from protrain.engine.states.values import write_master
from protrain.engine.weights.parameter import edit_error, same_bits, set_data


def repoint(members: Iterable[Member]) -> None:
    """Let parameters of persistent chunks be views of their chunks again, if a module has replaced their storage.

    Recurrent modules replace it (``flatten_parameters``) by one with the same values. An update of the chunk would no
    longer reach the parameter.

    Raises:
        MisuseError: the values differ, or were changed in place. Values that were changed in place become the master.
    """
    edited = []
    for member in members:
        if member.parameter.data_ptr() != member.address:
            _restore_storage(member)
        elif member.parameter._version != member.edits:
            edited.append(member)
    for member in edited:  # all of them, as a master that does not belong to its weight can be NaN
        member.edits = member.parameter._version
        if member.chunk.master is not None:
            write_master(member, member.parameter.detach())
        member.chunk.version += 1
    if edited:
        raise edit_error(edited[0].name, "changed in place")


def edit_in(member: Member, buffer: Tensor) -> str | None:
    """How a parameter was edited while its data lay in ``buffer``: "replaced", "changed in place", or None."""
    before, member.edits = member.edits, member.parameter._version
    if member.parameter.data_ptr() != buffer.data_ptr() + member.offset * buffer.itemsize:
        return None if _has_values_of(member, member.view(buffer)) else "replaced"
    return None if before == member.edits else "changed in place"


def _restore_storage(member: Member) -> None:
    weight = member.view(member.chunk.weight)
    same = _has_values_of(member, weight)
    set_data(member.parameter, weight)
    member.edits = member.parameter._version
    if not same:
        raise edit_error(member.name, "replaced")


def _has_values_of(member: Member, weight: Tensor) -> bool:
    """Whether a parameter whose storage was replaced has the same values as ``weight``."""
    found = member.parameter.detach()
    same_kind = (found.dtype, found.shape) == (weight.dtype, weight.shape)
    return same_kind and same_bits(found.to(weight.device), weight)
