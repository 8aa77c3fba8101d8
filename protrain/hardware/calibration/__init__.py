"""Measures the ceilings of this machine, alone and together. ``run`` reads from top to bottom as the measuring goes."""

from protrain.hardware.calibration.report import report
from protrain.hardware.calibration.run import calibrate
from protrain.hardware.calibration.timing import FULL_SECONDS

__all__ = ["FULL_SECONDS", "calibrate", "report"]
