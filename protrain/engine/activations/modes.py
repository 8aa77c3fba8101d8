"""What becomes of the tensors that a unit saves, by its mode; and swapped blocks that are packed.

[Note: packed swaps] A swapped block may have one copy each way. At the end of forward one kernel packs the storages of
the tensors that it saves into one buffer. The originals are freed at once, as the kernel runs before any work that gets
their memory. In backward the tensors are views of the buffer that was fetched, which stays until the last of them is
used. Where backward makes a graph, they are copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from protrain.engine.activations.saved import CheckpointFrame, Frame
from protrain.engine.activations.swap import CheckpointSwapFrame, Offload, OffloadedTensor, Storage, SwapFrame
from protrain.engine.units import Unit
from protrain.engine.weights.handle import Engine
from protrain.engine.weights.views import ViewForm
from protrain.forward.dispatch import detached
from protrain.planning.plan import BlockMode
from protrain_kernels import Packed, PackedView, pack, unpack


@dataclass(eq=False)
class _PackedTensor(OffloadedTensor):
    """Stands for a tensor that is packed."""

    original: Tensor | None = None  # until it is packed
    index: int = -1  # among those that are packed


class PackedOffload(Offload):
    """The tensors that one call of ``unit`` keeps in host memory, packed into one buffer."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self._buffer = Storage(0, None)
        self._views: tuple[PackedView, ...] = ()

    @override
    def _placeholder(self, tensor: Tensor, watch: Tensor) -> OffloadedTensor:
        form = ViewForm.of(tensor)
        original = form.flipped(detached(tensor))  # pack takes neither conjugate nor negative views
        self._engine.ledger.hold(original)
        return _PackedTensor(self._buffer, watch, tensor._version, form, original=original)

    @override
    def start(self) -> None:
        tensors = [tensor for tensor in self._tensors.values() if isinstance(tensor, _PackedTensor)]
        buffer, self._views = pack([tensor.original for tensor in tensors if tensor.original is not None])
        self._engine.ledger.hold(buffer)
        self._buffer.size_bytes, self._buffer.device = buffer.numel(), buffer
        self._storages[0] = self._buffer
        for index, tensor in enumerate(tensors):
            tensor.index, tensor.original = index, None
        super().start()

    @override
    def rebuild(self, offloaded: OffloadedTensor) -> Tensor:
        assert isinstance(offloaded, _PackedTensor)
        if offloaded.original is not None:  # not packed yet: the block computes gradients itself
            return offloaded.form.flipped(offloaded.original)
        packed = Packed(self._for_one_user(self._buffer), (self._views[offloaded.index],))
        # A graph of gradients holds some of the tensors, and must not hold the whole buffer.
        (tensor,) = unpack(packed, copies=torch.is_grad_enabled())
        self._engine.ledger.hold(tensor)
        return offloaded.form.flipped(tensor)


_FRAMES: dict[BlockMode, type[Frame]] = {
    BlockMode.NONE: Frame,
    BlockMode.CKPT: CheckpointFrame,
    BlockMode.CKPT_SWAP: CheckpointSwapFrame,
}


def frame_of(engine: Engine, unit: Unit) -> Frame:
    """The frame for a call of ``unit`` now, by its mode, or with ``engine.recompute_all`` as a recomputed block."""
    mode = BlockMode.CKPT if engine.recompute_all and unit.is_block else unit.mode
    if mode is BlockMode.SWAP:
        return SwapFrame(engine, unit, PackedOffload if unit.packs else Offload)
    return _FRAMES[mode](engine, unit)
