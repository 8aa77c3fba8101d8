"""What becomes of the tensors that a unit saves, by its mode."""

from __future__ import annotations

from protrain.engine.activations.packed import PackedSwapFrame
from protrain.engine.activations.saved import CheckpointFrame, Frame
from protrain.engine.activations.swap import CheckpointSwapFrame, SwapFrame
from protrain.engine.units import Unit
from protrain.planning.plan import BlockMode

_FRAMES: dict[BlockMode, type[Frame]] = {
    BlockMode.NONE: Frame,
    BlockMode.CKPT: CheckpointFrame,
    BlockMode.SWAP: SwapFrame,
    BlockMode.CKPT_SWAP: CheckpointSwapFrame,
}


def frame_of(unit: Unit) -> type[Frame]:
    """The frame under which calls of ``unit`` run."""
    return PackedSwapFrame if unit.packs else _FRAMES[unit.mode]
