"""Finds a model's blocks and traces one training step of it."""

from protrain.profiler.blocks import find_blocks, find_units
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.trace import profile

__all__ = ["ModelProfile", "find_blocks", "find_units", "profile"]
