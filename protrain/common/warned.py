"""Lets warnings of ProTrain name the line of the user's code, where torch or a trainer stands between the two."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType

_LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "sentence_transformers", "torch")
_COMMAND = "protrain.cli."
_PACKAGES = frozenset({"contextlib", "protrain", "transformers", "trl", *_LIBRARIES})


def warn_user(message: str) -> None:
    """Warn at the line where the user's code has called torch, this library or one that trains with it."""
    user_line()(message)


def user_line() -> Callable[[str], None]:
    """A function that warns at the line where the user's code is now, whenever and in whatever thread it is called.

    It is the nearest line that belongs to none of the libraries. The command line uses the library as a user does.
    """
    frame: FrameType = sys._getframe()
    while frame.f_back is not None and _is_of_library(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return lambda message: warnings.warn_explicit(message, UserWarning, *place, registry)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES and not module.startswith(_COMMAND)
