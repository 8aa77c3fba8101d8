"""Which units use a parameter now, and what a parameter is while no unit uses it.

A parameter is bound while a unit that uses it runs: its data is then a view of a chunk on the device. Otherwise it is
released, unless full_parameters or a state_dict() has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.states.chunks import Member
from protrain.engine.states.edits import find_edited, keep_edit, undo_edit
from protrain.engine.units import ManagedModel, Unit
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.parameter import PresentParameter, edit_error, set_data
from protrain.engine.weights.released import ReleasedParameter
from protrain.planning.schedule import Schedule


class Bindings:
    """Binds and releases the parameters of one engine.

    Args:
        managed: the model.
        buffers: where weights lie while units use them.
    """

    def __init__(self, managed: ManagedModel, buffers: BufferPool) -> None:
        members, memory = managed.members, managed.memory
        self.full: set[int] = set()  # parameters that full_parameters has on the CPU now
        self.in_state_dict: dict[int, Member] = {}  # parameters that a state_dict() or load_state_dict() uses now
        self.kept: dict[int, Tensor] = {}  # copies of weights that the first rank has inside first_rank_saves
        self._members = members
        self._resident = [member for member in members if member.chunk.resident]
        for member in self._resident:
            member.address = member.view(member.chunk.weight).data_ptr()
        self._buffers = buffers
        # It expands to any shape.
        self.placeholder = torch.full((), float("nan"), dtype=memory.dtype, device=memory.device)
        self._idle = [  # by parameter: its data while no unit uses it
            member.view(member.chunk.weight) if member.chunk.resident else self.placeholder.expand(member.shape)
            for member in members
        ]
        self._edited: set[int] = set()  # chunks whose buffers have edited values, which must not be used again

    def bind(self, unit: Unit, schedule: Schedule) -> None:
        """Put the parameters of ``unit`` on the device, and keep them there."""
        self._buffers.acquire_all(unit.chunks, schedule)
        for member in unit.moving:
            if member.bound == 0:
                data = self._buffers.weight(member)
                member.address = data.data_ptr()
                set_data(member.parameter, data)
        for member in unit.members:
            member.bound += 1
            member.parameter.__class__ = PresentParameter

    def unbind(self, unit: Unit) -> None:
        """End one ``bind``. MisuseError if a parameter was edited."""
        error = self._undo_edits(find_edited(unit.members))
        for member in unit.members:
            member.bound -= 1
            if member.bound == 0:
                member.parameter.__class__ = ReleasedParameter
        for member in unit.moving:
            if member.bound == 0:
                set_data(member.parameter, self._idle[member.index])
        for chunk in unit.chunks:
            self._buffers.release(chunk)
            if chunk.index in self._edited and not self._buffers.in_use(chunk):
                self._buffers.invalidate(chunk)
                self._edited.remove(chunk.index)
        if error is not None:
            raise error

    def _undo_edits(self, members: Iterable[Member]) -> MisuseError | None:
        """Have ``members``, which are edited, go on with values that the engine knows. Returns an error for the user.

        Values that were written over a resident weight become its master. In other buffers the weight is uploaded anew.
        """
        error = None
        for member in members:
            chunk = member.chunk
            how = undo_edit(member, member.view(chunk.weight) if chunk.resident else self._buffers.weight(member))
            if how is None:
                continue
            error = error or edit_error(member.name, how)
            if not chunk.resident:
                self._edited.add(chunk.index)
            elif how == "changed in place":
                keep_edit(member)
        return error

    def release(self, member: Member) -> None:
        """No unit uses the parameter of ``member``."""
        set_data(member.parameter, self._idle[member.index])
        member.parameter.__class__ = ReleasedParameter

    def release_all(self) -> None:
        """Release every parameter, after an interrupt that has left some bound."""
        self._buffers.release_all()
        for member in self._members:
            member.bound = 0
            if member.index not in self.full and member.index not in self.in_state_dict:
                self.release(member)

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
        """MisuseError if a resident weight was edited while no unit used it, outside of full_parameters."""
        # Every step runs this for every parameter, and hardly any was edited: so one comparison must do.
        with torch._C.DisableTorchFunctionSubclass():
            changed = [member for member in self._resident if member.parameter._version != member.edits]
            error = self._undo_edits(member for member in changed if member.index not in self.full)
        if error is not None:
            raise error
