"""ProTrain: trains models far bigger than the GPU's memory, with the results of the plain loop and nothing to tune.

Importing torch takes seconds. So the package imports it with the first use of one of its names, and the command line
answers `--help` without it.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from protrain.common import signals  # noqa: F401  # first: Ctrl-C may come while torch is imported

if TYPE_CHECKING:
    from protrain.public import *  # noqa: F403  # what type checkers see of the package
else:

    def __getattr__(name: str) -> Any:
        """Import all public names with the first of them.

        No module of the package may have the name of one of them, because an imported module takes its place in the
        package, and nobody asks for a name that is there.
        """
        if name == "__all__" or not name.startswith("_"):
            public = import_module("protrain.public")
            globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
        if name not in globals():  # a subpackage is here once it is imported
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])  # Python then looks for what was meant
        return globals()[name]

    def __dir__() -> list[str]:
        """The public names, before the first of them is used, too: what completes ``protrain.`` or a misspelt name."""
        return ["__version__", *__getattr__("__all__")]


__version__ = "0.1.0"
