"""ProTrain: trains models far bigger than the GPU's memory, with the results of the plain loop and nothing to tune.

Importing torch takes seconds. So the package imports it with the first use of one of its names, and the command line
answers `--help` without it.
"""

from typing import TYPE_CHECKING

from protrain.common import interrupt  # noqa: F401  # first: Ctrl-C may come while torch is imported
from protrain.common.late_names import late_names

if TYPE_CHECKING:
    from protrain.public import *  # noqa: F403  # what type checkers see of the package
else:
    __getattr__ = late_names(__name__)

__version__ = "0.1.0"
