"""Storages: views of weights in them, and how many bytes of them a simulated device holds.

The engine recognises a view of a weight by its storage, and makes the same view on other memory.

The ledger of a simulated device counts the bytes of activations between operations against the budget. On a GPU the
allocator counts them. On a CPU nothing would stop a step from using more than ``device_memory`` allows, so every
activation that the engine keeps is counted, and an excess is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from protrain.common.errors import BudgetError
from protrain.common.parameters import made_of
from protrain.common.tables import format_bytes


def storage_address(tensor: Tensor) -> int:
    """The address of the storage of ``tensor``; 0 if it consists of other tensors, as quantised tensors do."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def storage_bytes(tensor: Tensor) -> Tensor:
    """The bytes of the whole storage of ``tensor``, 1-d."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class ViewForm(NamedTuple):
    """How a tensor lies in its storage. A view may read the same bytes as another type (``view_as_complex``)."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements of ``dtype`` from the start of the storage
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: Tensor) -> ViewForm:
        """The form of ``tensor``."""
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, memory: Tensor) -> Tensor:
        """A tensor of this form on ``memory``, which is 1-d and covers its storage."""
        view = memory if memory.dtype == self.dtype else memory.view(self.dtype)
        return self.flipped(view.as_strided(self.shape, self.stride, self.offset))

    def flipped(self, tensor: Tensor) -> Tensor:
        """``tensor`` as a conjugate or negative view, if this form is one, or without that if it is one already."""
        view = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(view) if self.negative else view


class Ledger:
    """Counts nothing, as a GPU's allocator does."""

    def hold(self, tensor: Tensor, address: int = 0, *, within: object | None = None) -> None:
        """Count the storage of ``tensor`` until the tensor object dies, or ``within``, which needs it.

        Inputs of the model die in the memory of a GPU, but the script may keep them on a CPU. A caller that knows the
        ``address`` of the storage passes it, because every saved tensor comes here.
        """


class _Held(weakref.ref[Tensor]):
    """A tensor that is counted. It does less than ``weakref.finalize``, as every saved tensor makes one."""

    __slots__ = ("address",)
    address: int  # of its storage


class SimulatedLedger(Ledger):
    """Counts the distinct storages that the engine keeps, and raises BudgetError beyond ``budget_bytes``."""

    def __init__(self, *, budget_bytes: int, fixed_bytes: int, fixed: Iterable[Tensor] = ()) -> None:
        self.budget_bytes = budget_bytes
        self.fixed_bytes = fixed_bytes  # chunks, buffers, staging, and the plan's transient part
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in fixed}  # counted in fixed_bytes
        self.held_bytes = 0
        self.peak_bytes = fixed_bytes
        self._storages: dict[int, list[int]] = {}  # by address: how many tensors keep a storage, and its bytes
        self._held: dict[int, _Held] = {}  # by its id, until the tensor dies

    @override
    def hold(self, tensor: Tensor, address: int = 0, *, within: object | None = None) -> None:
        known = address or storage_address(tensor)
        for part in (tensor,) if known else made_of(tensor).values():
            address = known or storage_address(part)
            if address in self._fixed:
                continue
            counted = self._storages.get(address)
            if counted is None:
                counted = self._storages[address] = [0, part.untyped_storage().nbytes()]
                self.held_bytes += counted[1]
            counted[0] += 1
            held = _Held(tensor, self._drop)
            held.address = address
            self._held[id(held)] = held
            if within is not None:
                weakref.finalize(within, self._drop, held)
        taken = self.fixed_bytes + self.held_bytes
        if taken > self.budget_bytes:  # it is no peak, as it may be freed again and the training go on
            raise BudgetError(
                f"the simulated device is full: {format_bytes(self.fixed_bytes)} fixed and "
                f"{format_bytes(self.held_bytes)} of activations held exceed device_memory="
                f"{format_bytes(self.budget_bytes)}; wrap with an example_batch that is as large as the largest step, "
                "call backward() before the next forward and without retain_graph, leave torch.autocast off (its "
                "copies of weights count), or allow more device_memory"
            )
        if taken > self.peak_bytes:
            self.peak_bytes = taken

    def _drop(self, held: _Held) -> None:
        if self._held.pop(id(held), None) is None:
            return
        counted = self._storages[held.address]
        counted[0] -= 1
        if counted[0] == 0:
            del self._storages[held.address]
            self.held_bytes -= counted[1]
