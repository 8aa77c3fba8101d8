"""Imports without garbage collection: torch and transformers make a million objects, all of which stay to the end.

Python's collector would look at all of them again and again, during imports and in whatever comes after.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from protrain.common.signals import is_program


@contextmanager
def importing() -> Iterator[None]:
    """Inside, the program `protrain` collects no garbage, and if modules were imported, no later collection sees them.

    Later collections see no object at all that is there by then. So nothing may be there that has to be freed, such as
    a model: its parts refer to each other, and only a collection frees them. A process that merely calls functions of
    the command line may have models, and is left alone.
    """
    if not is_program():
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
            atexit.register(gc.unfreeze)  # libraries take what is left at the end for leaks, and print a list of it
        gc.enable()
