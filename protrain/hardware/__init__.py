"""What a machine can do, as measured by ``calibrate``, shipped for known GPUs, or detected."""

from protrain.hardware.calibration import calibrate
from protrain.hardware.detect import detect
from protrain.hardware.profile import Contention, Figure, HardwareProfile
from protrain.hardware.shipped import load, of_machine, shipped_names

__all__ = ["Contention", "Figure", "HardwareProfile", "calibrate", "detect", "load", "of_machine", "shipped_names"]
