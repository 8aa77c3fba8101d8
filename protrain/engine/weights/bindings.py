"""Which units use a parameter now, and what a parameter is while no unit uses it.

A parameter is bound while a unit that uses it runs: its data is then a view of a chunk on the device. Otherwise it is
released, unless full_parameters or a state_dict() has it.

[Note: edits] A write into a weight on the device changes neither its master nor its copy in host memory. So values may
be edited inside ``full_parameters`` only, and every other edit is an error. If the data of a parameter was replaced,
the address of its storage differs. If it was changed in place, its version counter differs, which autograd keeps. The
engine never touches that counter, because its kernels write to chunks. So after a change in place every later use of
the weight raises the error again: the values of the last step are lost where the weight has one place alone.

A view of a weight may leave the unit that made it, and the chunk may lie elsewhere when the view is used. So such views
are copied. Views of resident weights are treated like all others, so that what a script may do does not depend on the
plan.

[Note: gradients of copies] A view that several units are given has the gradient of the plain loop only if all of its
uses are added up in the plain loop's order. A copy that is a node of the graph would first add up those of one unit. So
the copy has the place of the original in the graph: autograd gives it to whatever the hook for saved tensors returns.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from protrain.common.errors import MisuseError
from protrain.common.parameters import same_bytes
from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.activations.saved import copy_with_strides
from protrain.engine.states.chunks import Member
from protrain.engine.units import ManagedModel, Unit
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.parameter import PresentParameter, edit_error, set_data
from protrain.engine.weights.released import ReleasedParameter
from protrain.engine.weights.views import storage_address
from protrain.planning.schedule import Schedule


class Bindings:
    """Binds and releases the parameters of one engine."""

    def __init__(self, managed: ManagedModel, buffers: BufferPool) -> None:
        members, memory = managed.members, managed.memory
        self.full: set[int] = set()  # parameters that full_parameters has on the CPU now
        self.weights_overridden_by = ""  # the context, if any, inside which the model has other weights
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

    def bind(self, unit: Unit, schedule: Schedule) -> None:
        """Put the parameters of ``unit`` on the device, and keep them there."""
        self._buffers.acquire(unit.chunks, schedule)
        with torch._C.DisableTorchFunctionSubclass():
            for chunk, members in unit.moving:
                buffer = self._buffers.used(chunk)
                for member in members:
                    if member.bound == 0:
                        data = buffer.view(member)
                        member.address = data.data_ptr()
                        set_data(member.parameter, data)
            for member in unit.members:
                member.bound += 1
                member.parameter.__class__ = PresentParameter

    def unbind(self, unit: Unit) -> None:
        """End one ``bind``. MisuseError if a parameter was edited."""
        with torch._C.DisableTorchFunctionSubclass():
            edited = [
                member
                for member in unit.members
                if member.parameter._version != member.edits or member.parameter.data_ptr() != member.address
            ]
            kinds = {member.name: how for member in edited if (how := self._edit_of(member)) is not None}
            for member in unit.members:
                member.bound -= 1
                if member.bound == 0:
                    member.parameter.__class__ = ReleasedParameter
                    if not member.chunk.resident:
                        set_data(member.parameter, self._idle[member.index])
        for chunk in unit.chunks:
            self._buffers.release(chunk)
        for name, how in kinds.items():
            raise edit_error(name, how)

    def _edit_of(self, member: Member) -> str | None:
        """How ``member`` was edited, whose data is there now. None: its storage has the values that it had.

        Recurrent modules give their weights another storage (``flatten_parameters``). The parameter gets its own back.
        This is called where torch functions of subclasses are disabled.
        """
        if member.parameter.data_ptr() == member.address:
            return "changed in place"
        weight = (
            member.view(member.chunk.weight) if member.chunk.resident else self._buffers.used(member.chunk).view(member)
        )
        if not same_bytes(member.parameter.detach().to(weight.device), weight):
            return "replaced"
        set_data(member.parameter, weight)
        member.edits = member.parameter._version
        return None

    def release(self, member: Member) -> None:
        """No unit uses the parameter of ``member``."""
        with torch._C.DisableTorchFunctionSubclass():
            set_data(member.parameter, self._idle[member.index])
        member.parameter.__class__ = ReleasedParameter

    def reset(self) -> None:
        """Release every parameter, and empty the buffers that chunks take turns in."""
        self._buffers.reset()
        for member in self._members:
            member.bound = 0
            if member.index not in self.full:
                self.release(member)

    def refuse_inside_full_parameters(self, what: str) -> None:
        """MisuseError inside full_parameters, as ``what`` would neither use nor update the copies on the CPU."""
        if self.full:
            name = self._members[min(self.full)].name
            raise MisuseError(
                f"{what} inside `with protrain.full_parameters(...)`, which has {name} on the CPU: leave it first"
            )

    def refuse_overridden(self, what: str) -> None:
        """MisuseError inside a context that has given the model other weights, as it would take ``what`` back."""
        if self.weights_overridden_by:
            raise MisuseError(
                f"{what} inside `with {self.weights_overridden_by}`, which has given the model other weights: leave "
                "it first"
            )

    def refuse_write(self, what: str) -> None:
        """MisuseError where ``what`` would write weights or states that are overridden, or that a unit uses now."""
        self.refuse_overridden(what)
        bound = next((member for member in self._members if member.bound), None)
        if bound is not None:
            raise MisuseError(
                f"{what} inside a forward or backward, which uses {bound.name} now: call it between steps, not in "
                "a hook"
            )

    def refuse_edits(self) -> None:
        """MisuseError if a resident weight was edited while no unit used it, outside of full_parameters."""
        # Every step runs this for every parameter, and hardly any was edited: so one comparison must do.
        with torch._C.DisableTorchFunctionSubclass():
            for member in self._resident:
                if member.parameter._version != member.edits and member.index not in self.full:
                    how = self._edit_of(member)
                    if how is not None:
                        raise edit_error(member.name, how)


def copy_escaping_weights(tree: Any, buffers: BufferPool, *, own: Unit | None = None) -> Any:
    """``tree`` with copies in place of the views of weights that it passes from one unit to another.

    Args:
        tree: the arguments or the output of a unit.
        buffers: where weights lie.
        own: the unit that gets ``tree``. Its own parameters are not copied, as they are on the device while it runs.
    """
    storages = buffers.by_address

    def escapes(leaf: Any) -> bool:
        if type(leaf) is Tensor:
            return storage_address(leaf) in storages
        if not isinstance(leaf, Tensor) or isinstance(leaf, ReleasedParameter) or storage_address(leaf) not in storages:
            return False
        return own is None or not any(leaf is member.parameter for member in own.members)

    for tensor in tensors_in(tree):  # every call of every unit runs this loop, and hardly any finds something
        if escapes(tensor):
            return map_leaves(lambda leaf: _copied(leaf, buffers) if escapes(leaf) else leaf, tree)
    return tree


class _Saving(torch.autograd.Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.new_empty(())


class _InPlace:
    """Hooks by which autograd gives back ``copy`` for whatever it has saved. ``buffers`` are those of the engine."""

    def __init__(self, copy: Tensor, buffers: BufferPool) -> None:
        self._copy, self.buffers = copy, buffers

    def keep(self, _: Tensor) -> None:
        """Keep nothing."""

    def restore(self, _: None) -> Tensor:
        """Give back the copy."""
        return self._copy


def _copied(tensor: Tensor, buffers: BufferPool) -> Tensor:
    """A copy whose gradient is added to that of ``tensor``: [Note: gradients of copies]."""
    copy = copy_with_strides(tensor)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return copy
    hooks = _InPlace(copy, buffers)
    with saved_tensors_hooks(hooks.keep, hooks.restore):
        output = _Saving.apply(tensor)
    # read while the output is there: torch 2.11 frees with it what its node has saved
    found: Tensor = output.grad_fn.saved_tensors[0]
    return found


def refuse_leaked_views(unit: Unit, buffers: BufferPool) -> None:
    """MisuseError where the forward of ``unit`` has left a view of a weight that the engine does not know of.

    The engine knows the views that autograd saves. Any other view would show another chunk's weight in backward. It is
    found by counting: the memory of the chunk has more users after the unit than before it.
    """
    if not any(map(buffers.has_leaked_view, unit.chunks)):
        return
    gc.collect()  # an unreachable cycle may hold the view
    for chunk in filter(buffers.has_leaked_view, unit.chunks):
        names = [member.name for member in unit.members if member.chunk is chunk]
        raise MisuseError(
            f"{unit.label} keeps a view of a weight ({', '.join(names)}) after its forward, when the weight may have "
            "left the device: in a torch.autograd.Function use ctx.save_for_backward and no attribute of ctx, and "
            "elsewhere, another thread that reads the model included, keep a copy (tensor.clone())"
        )
