"""The names of the package, which ``protrain/hardware/__init__.py`` imports from here at the first use of one."""

from protrain.hardware.calibration import calibrate
from protrain.hardware.detection import detect
from protrain.hardware.profile import Contention, Figure, HardwareProfile
from protrain.hardware.shipped import load, of_machine, shipped_names

__all__ = ["Contention", "Figure", "HardwareProfile", "calibrate", "detect", "load", "of_machine", "shipped_names"]
