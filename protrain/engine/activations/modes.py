"""What becomes of the tensors that a unit saves, by its mode; and swapped blocks that are packed.

[Note: packed swaps] A swapped block may have one copy each way. At the end of forward one kernel packs the storages of
the tensors that it saves into one buffer. The originals are freed at once, as the kernel runs before any work that gets
their memory. In backward the tensors are views of the buffer that was fetched, which stays until the last of them is
used.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from protrain.engine.activations.saved import CheckpointFrame, Frame
from protrain.engine.activations.swap import CheckpointSwapFrame, Offload, OffloadedTensor, Storage, SwapFrame
from protrain.engine.units import ManagedModel, Unit
from protrain.engine.weights.handle import Engine
from protrain.engine.weights.views import ViewForm
from protrain.forward.dispatch import detached
from protrain.planning.plan import BlockMode, Modes
from protrain_kernels import Packed, pack, unpack


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
        self._packed: Packed | None = None

    @override
    def _placeholder(self, tensor: Tensor, watch: Tensor) -> OffloadedTensor:
        form = ViewForm.of(tensor)
        original = form.flipped(detached(tensor))  # pack takes neither conjugate nor negative views
        self._engine.ledger.hold(original)
        return _PackedTensor(self._buffer, watch, tensor._version, form, original=original)

    @override
    def start(self) -> None:
        tensors = [tensor for tensor in self._tensors.values() if isinstance(tensor, _PackedTensor)]
        self._packed = pack([tensor.original for tensor in tensors if tensor.original is not None])
        buffer = self._packed.buffer
        self._packed = self._packed._replace(buffer=self._empty)
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
        assert self._packed is not None
        (tensor,) = unpack(self._packed._replace(buffer=self._for_one_user(self._buffer)), [offloaded.index])
        self._engine.ledger.hold(tensor)
        return offloaded.form.flipped(tensor)


class PackedSwapFrame(SwapFrame):
    """One call of a unit whose saved tensors are offloaded and fetched in one buffer (SWAP if the plan packs)."""

    offload_class = PackedOffload


_FRAMES: dict[BlockMode, type[Frame]] = {
    BlockMode.NONE: Frame,
    BlockMode.CKPT: CheckpointFrame,
    BlockMode.SWAP: SwapFrame,
    BlockMode.CKPT_SWAP: CheckpointSwapFrame,
}


class Frames:
    """The kinds of frames under which the calls of a model's units run.

    Attributes:
        recompute_all: in the current forward every block is recomputed, for less memory than under the plan. Nothing is
            offloaded, so that the host needs no more memory either.
    """

    def __init__(self, managed: ManagedModel) -> None:
        modes = managed.plan.block_modes
        self._planned = _by_unit(managed, modes)
        self._recomputed = _by_unit(managed, (BlockMode.CKPT,) * len(modes))
        self.recompute_all = False

    def of(self, unit: Unit) -> type[Frame]:
        """The frame for a call of ``unit`` now."""
        return (self._recomputed if self.recompute_all else self._planned)[unit.index]


def _by_unit(managed: ManagedModel, modes: Modes) -> list[type[Frame]]:
    """The frame of each unit where blocks have these ``modes``."""
    return [
        Frame if record.block is None else _frame_of(modes[record.block], packs=unit.packs)
        for unit, record in zip(managed.units, managed.profile.units, strict=True)
    ]


def _frame_of(mode: BlockMode, *, packs: bool) -> type[Frame]:
    return PackedSwapFrame if packs and mode is BlockMode.SWAP else _FRAMES[mode]
