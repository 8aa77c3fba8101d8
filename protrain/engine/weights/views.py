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
