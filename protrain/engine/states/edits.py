"""Values of managed parameters that were changed where the engine does not see it.

[Note: edits] The master of a 16-bit weight, and the copy in host memory of one that is fetched, do not follow what is
written into the weight on the device. So values are edited inside ``full_parameters`` alone, and anything else is an
error. Storage of another address shows that the data was replaced; that it was changed in place shows in the version
counter of the parameter, which autograd keeps and which nothing of the engine touches: kernels write to chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from protrain.engine.states.chunks import Member
from protrain.engine.states.values import write_master
from protrain.engine.weights.parameter import edit_error, same_bits, set_data


def recall(members: Iterable[Member]) -> None:
    """Point parameters of persistent chunks at their chunk again, where a module gave them storage of their own.

    Recurrent modules do (``flatten_parameters``), with the same values, and an update of the chunk would no longer
    reach them.

    Raises:
        MisuseError: the values are others, or were changed in place. The latter count, as if assigned as the master.
    """
    edited = []
    for member in members:
        if member.parameter.data_ptr() != member.address:
            _take_back(member)
        elif member.parameter._version != member.edits:
            edited.append(member)
    for member in edited:  # all of them: a master that does not belong to its weight can be NaN
        member.edits = member.parameter._version
        if member.chunk.master is not None:
            write_master(member, member.parameter.detach())
        member.chunk.version += 1
    if edited:
        raise edit_error(edited[0].name, "changed in place")


def edit_in(member: Member, buffer: Tensor) -> str | None:
    """How the data of a parameter was edited while it lay in its chunk's ``buffer``: in words, or None."""
    before, member.edits = member.edits, member.parameter._version
    if member.parameter.data_ptr() != buffer.data_ptr() + member.offset * buffer.itemsize:
        return None if _has_values_of(member, member.view(buffer)) else "replaced"
    return None if before == member.edits else "changed in place"


def _take_back(member: Member) -> None:
    kept = member.view(member.chunk.weight)
    same = _has_values_of(member, kept)
    set_data(member.parameter, kept)
    member.edits = member.parameter._version
    if not same:
        raise edit_error(member.name, "replaced")


def _has_values_of(member: Member, kept: Tensor) -> bool:
    """Whether a parameter that was given storage of its own still has the values ``kept``."""
    found = member.parameter.detach()
    same_kind = (found.dtype, found.shape) == (kept.dtype, kept.shape)
    return same_kind and same_bits(found.to(kept.device), kept)
