"""Names of a package that need torch, whose import takes seconds: they are imported when the first of them is used.

Such names are those of the module ``public`` in the package. What needs no torch is imported from the modules that
define it, so that planning for a machine that is elsewhere never waits for torch.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def late_names(package: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package``, which imports all public names with the first of them.

    No module of the package may have the name of one of them, because an imported module takes its place in the
    package, and nobody asks for a name that is there.

    Args:
        package: the ``__name__`` of the package, whose module ``public`` has the names in its ``__all__``.
    """

    def get(name: str) -> Any:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        public = import_module(f"{package}.public")
        names = vars(sys.modules[package])
        names.update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
        try:
            return names[name]  # a subpackage is here once it is imported
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return get
