"""Imports without garbage collection: torch and transformers make a million objects, all of which stay to the end.

Python's collector would look at all of them again and again, during imports and in whatever comes after.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Inside, no garbage is collected. If modules were imported, no later collection looks at what is there by now."""
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
            atexit.register(gc.unfreeze)  # libraries take what is left at the end for leaks, and print a list of it
        gc.enable()
