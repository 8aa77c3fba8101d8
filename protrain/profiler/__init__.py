"""Finds a model's blocks and traces one training step of it."""

from protrain.profiler.blocks import find_blocks, find_units
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord
from protrain.profiler.trace import profile

__all__ = [
    "BlockRecord",
    "ModelProfile",
    "ParameterRecord",
    "SegmentRecord",
    "UnitRecord",
    "find_blocks",
    "find_units",
    "profile",
]
