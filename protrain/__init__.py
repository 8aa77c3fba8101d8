"""ProTrain: trains models far bigger than the GPU's memory, with the results of the plain loop and nothing to tune.

Importing torch takes seconds. So the package imports it with the first use of one of its names, and the command line
answers `--help` without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protrain.common import interrupt  # noqa: F401  # first: Ctrl-C may come while torch is imported

if TYPE_CHECKING:
    from protrain.public import *  # noqa: F403  # what type checkers see of the package

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import all names of the package, or the subpackage ``name``."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = import_module("protrain.public")

    globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
    try:
        return globals()[name]  # a subpackage is here once it is imported
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
