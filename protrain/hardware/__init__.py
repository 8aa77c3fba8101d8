"""What a machine can do: measured by ``calibrate``, shipped for known GPUs, or detected."""

from protrain.hardware.calibrate import calibrate
from protrain.hardware.detect import detect
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load, shipped_names

__all__ = ["HardwareProfile", "calibrate", "detect", "load", "shipped_names"]
