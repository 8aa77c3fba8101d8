"""The names of the package, which ``protrain/profiler/__init__.py`` imports from here at the first use of one."""

from protrain.profiler.blocks import find_blocks, find_units
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.trace import profile

__all__ = ["ModelProfile", "find_blocks", "find_units", "profile"]
