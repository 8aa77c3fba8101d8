"""Views of weights: how the engine recognises one by its storage, and makes the same view on other memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def storage_address(tensor: Tensor) -> int:
    """The address of the storage of ``tensor``; 0 if it consists of other tensors, as quantised tensors do."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def storage_bytes(tensor: Tensor) -> Tensor:
    """The bytes of the whole storage of ``tensor``, 1-d."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class ViewCounter:
    """Counts the tensors that share ``memory``, to find views that outlive the use of it.

    Views that autograd saves through the engine may outlive it. The engine adds each of them to ``known``.
    """

    def __init__(self, memory: Tensor) -> None:
        self.known = 0  # never decreases: when known views die, some unknown ones may go unnoticed
        self._storage = memory.untyped_storage()
        self._before = self._count()

    def begin_use(self) -> None:
        """Units begin to use the memory."""
        self._before = self._count() - self.known

    def has_unknown(self) -> bool:
        """Whether more tensors share the memory than when units began to use it, beside those that are known."""
        return self._count() - self.known > self._before

    def _count(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count


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
