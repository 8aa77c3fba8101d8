"""Finds a model's blocks and traces one training step of it."""

from typing import TYPE_CHECKING

from protrain.common.late_names import late_names

if TYPE_CHECKING:
    from protrain.profiler.public import *  # noqa: F403  # what type checkers see of the package
else:
    __getattr__ = late_names(__name__)
