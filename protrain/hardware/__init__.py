"""What a machine can do, as measured by ``calibrate``, shipped for known GPUs, or detected."""

from typing import TYPE_CHECKING

from protrain.common.late_names import late_names

if TYPE_CHECKING:
    from protrain.hardware.public import *  # noqa: F403  # what type checkers see of the package
else:
    __getattr__ = late_names(__name__)
