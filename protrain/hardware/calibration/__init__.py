"""Measures the ceilings of this machine, alone and together: one module for each thing that is measured."""

from protrain.hardware.calibration.doubts import differences
from protrain.hardware.calibration.effort import FULL_SECONDS
from protrain.hardware.calibration.figures import report
from protrain.hardware.calibration.run import calibrate, calibrate_twice

__all__ = ["FULL_SECONDS", "calibrate", "calibrate_twice", "differences", "report"]
