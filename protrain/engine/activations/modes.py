"""What becomes of the tensors that a unit saves, by its mode."""

from __future__ import annotations

from protrain.engine.activations.packed import PackedSwapFrame
from protrain.engine.activations.saved import CheckpointFrame, Frame
from protrain.engine.activations.swap import CheckpointSwapFrame, SwapFrame
from protrain.engine.units import ManagedModel, Unit
from protrain.planning.plan import BlockMode, Modes

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
