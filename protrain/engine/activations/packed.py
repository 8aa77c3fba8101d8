"""SWAP in one copy each way: what a block saves is packed into one buffer, which goes to host memory and back.

At the end of forward one kernel packs views of one storage once, bools as bits, views with gaps without them, and the
originals are freed at once: the kernel has run before whatever gets their memory. The copies of the block before may
still run beside it: the GPU waits for them only then.

In backward tensors are views of the buffer that came back, and only bits and views with gaps are unpacked, by one
kernel into memory of their own. To unpack all of it would cost as much as packing, and twice the device memory; the
views cost nothing. Their price is that the buffer stays until the last of them is used.

Plans of packing are made for a block's first call and kept by layout (:func:`protrain_kernels.pack`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from protrain.engine.activations.saved import detached
from protrain.engine.activations.swap import Moved, MovedTensor, Storage, SwapEngine, SwapFrame
from protrain.engine.units import Unit
from protrain_kernels import PackPlan, pack


@dataclass(slots=True)
class _PackedTensor(MovedTensor):
    """A tensor that is packed."""

    index: int  # in the order in which they were saved


class PackedMoved(Moved):
    """What one call of ``unit`` keeps in host memory, packed into one buffer: its only storage."""

    def __init__(self, engine: SwapEngine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self._buffer = Storage(0, None)
        self._originals: list[Tensor] = []  # until they are packed
        self._plan: PackPlan | None = None
        self._no_frame = torch.empty(0, device=engine.device)
        self._rebuilt: list[Tensor | None] = []  # those that no node of this backward has taken yet

    @override
    def __len__(self) -> int:
        return self._buffer.users

    @override
    def add(self, tensor: Tensor) -> MovedTensor:
        original, watch = detached(tensor), detached(tensor)
        self._engine.ledger.hold(original)
        watch.data = self._no_frame  # it goes on counting changes in place of ``tensor``, without holding its memory
        packed = _PackedTensor(self._buffer, len(self._originals))
        self._originals.append(original)
        self._watched.append((packed, watch, tensor._version))
        self._buffer.users += 1
        return packed

    def pack(self) -> None:
        """Pack what was added: nothing more is."""
        if not self._originals:
            return
        self._plan, buffer = pack(self._originals)
        self._engine.ledger.hold(buffer)
        self._buffer.size_bytes, self._buffer.device = buffer.numel(), buffer
        self._storages[0] = self._buffer
        self._originals.clear()

    @override
    def rebuild(self, moved: MovedTensor) -> Tensor:
        assert isinstance(moved, _PackedTensor)
        if self._plan is None:  # by a block that computes gradients itself
            return self._originals[moved.index]
        buffer = self._for_one_user(self._buffer)
        tensor = self._rebuilt[moved.index] if self._rebuilt else None
        if tensor is None:
            unpacked = self._plan.unpack(buffer, in_place=True)
            for each in unpacked:
                self._engine.ledger.hold(each)
            self._rebuilt = [*unpacked]
            tensor = unpacked[moved.index]
        self._rebuilt[moved.index] = None  # its memory is freed with the node that takes it
        if self._buffer.device is None:
            self._rebuilt.clear()
        assert tensor is not None
        return tensor


class PackedSwapFrame(SwapFrame):
    """Moves what is saved to host memory and back in one buffer (SWAP where the plan packs)."""

    moved_class = PackedMoved

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def and_pack(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            assert isinstance(self.moved, PackedMoved)
            self.moved.pack()
            return output

        return super().run(and_pack, args, kwargs)
