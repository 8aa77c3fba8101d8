"""Which units use a parameter now, and what a parameter is while no unit uses it.

A parameter is bound while a unit that uses it runs: its data is then a view of a chunk on the device. Otherwise it is
released, unless full_parameters or a state_dict() has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.states.chunks import Chunk, Member
from protrain.engine.states.edits import edit_in, repoint
from protrain.engine.units import Unit
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.parameter import PresentParameter, edit_error
from protrain.engine.weights.released import ReleasedParameter, attach, release
from protrain.planning.schedule import Schedule


class Bindings:
    """Binds and releases the parameters of one engine.

    Args:
        members: all managed parameters.
        units: all units.
        buffers: where chunks that do not persist are fetched to.
        placeholder: one NaN element on the device.
    """

    def __init__(self, members: list[Member], units: list[Unit], buffers: BufferPool, placeholder: Tensor) -> None:
        self.full: set[int] = set()  # parameters that full_parameters has on the CPU now
        self.in_state_dict: dict[int, Member] = {}  # parameters that a state_dict() or load_state_dict() uses now
        self._members = members
        self._persistent_chunks = list(dict.fromkeys(chunk for unit in units for chunk in unit.persistent_chunks))
        self._persistent_members = [member for unit in units for member in unit.persistent_members]
        self._buffers = buffers
        self.placeholder = placeholder
        self._edited: set[int] = set()  # chunks whose buffers have edited values, which must not be used again

    def bind(self, unit: Unit, schedule: Schedule) -> None:
        """Put the parameters of ``unit`` on the device, and keep them there."""
        acquired = self._buffers.acquire_all(unit.chunks, schedule)
        for member in unit.members:
            member.bound += 1
            if member.bound == 1:
                attach(member.parameter, member.view(acquired[member.chunk.index]))
        for chunk in unit.persistent_chunks:
            if not chunk.users:
                chunk.view_counter.begin_use()
            chunk.users += 1
        for member in unit.persistent_members:
            member.bound += 1
            member.parameter.__class__ = PresentParameter

    def unbind(self, unit: Unit) -> None:
        """End one :meth:`bind`. MisuseError if a parameter in a buffer was edited."""
        how = {member: edit_in(member, self._buffers.content(member.chunk)) for member in unit.members}
        edited = [member for member in unit.members if how[member]]
        for member in unit.members:
            member.bound -= 1
            if member.bound == 0:
                release(member.parameter, self.placeholder)
        for member in unit.persistent_members:
            member.bound -= 1
            if member.bound == 0:
                member.parameter.__class__ = ReleasedParameter
        for chunk in unit.persistent_chunks:
            chunk.users -= 1
        self._edited |= {member.chunk.index for member in edited}
        for chunk in unit.chunks:
            self._buffers.release(chunk)
            if chunk.index in self._edited and not self._buffers.in_use(chunk):
                self._buffers.invalidate(chunk)
                self._edited.remove(chunk.index)
        if edited:
            raise edit_error(edited[0].name, str(how[edited[0]]))

    def release(self, member: Member) -> None:
        """No unit uses the parameter of ``member``. If its chunk does not persist it has no data now."""
        if member.chunk.persistent:
            attach(member.parameter, member.view(member.chunk.weight))
            member.parameter.__class__ = ReleasedParameter
        else:
            release(member.parameter, self.placeholder)

    def release_all(self) -> None:
        """Release every parameter, after an interrupt that has left some bound."""
        self._buffers.release_all()
        for member in self._members:
            member.chunk.users = 0
            member.bound = 0
            if member.index not in self.full and member.index not in self.in_state_dict:
                self.release(member)

    def any_in_use(self) -> bool:
        """Whether any unit uses any chunk."""
        return self._buffers.any_in_use() or any(chunk.users for chunk in self._persistent_chunks)

    def in_use(self, chunk: Chunk) -> bool:
        """Whether a unit uses ``chunk`` in a buffer now."""
        return not chunk.persistent and self._buffers.in_use(chunk)

    def end_state_dict(self, members: Iterable[int]) -> None:
        """A state_dict() or load_state_dict() is done with parameters, which are like all others again."""
        for index in members:
            member = self.in_state_dict.pop(index, None)
            if member is not None and index not in self.full:
                member.parameter.__class__ = PresentParameter if member.bound else ReleasedParameter

    def refuse_inside_full_parameters(self, what: str) -> None:
        """MisuseError inside full_parameters, as ``what`` would neither use nor update the copies on the CPU."""
        if self.full:
            name = self._members[min(self.full)].name
            raise MisuseError(
                f"{what} inside `with protrain.full_parameters(...)`, which has {name} on the CPU: leave it first"
            )

    def refuse_edits(self) -> None:
        """MisuseError if a weight in a persistent chunk was edited outside of full_parameters."""
        # Every step runs this for every parameter, and hardly any was edited: so one comparison must do.
        with torch._C.DisableTorchFunctionSubclass():
            changed = [member for member in self._persistent_members if member.parameter._version != member.edits]
            repoint(member for member in changed if member.index not in self.full)
