"""Lets warnings of ProTrain name the line of the user's code, where torch or a trainer stands between the two."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

_LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "sentence_transformers", "torch")
_COMMAND = "protrain.cli."
_PACKAGES = frozenset({"protrain", "transformers", "trl", *_LIBRARIES})


def warn_user(message: str) -> None:
    """Warn at the line where the user's code has called torch, this library or one that trains with it."""
    _warns_at(sys._getframe(1))(message)


def user_line() -> Callable[[str], None]:
    """A function that warns at the line where the user's code is now, whenever and in whatever thread it is called."""
    return _warns_at(sys._getframe(1))


def _warns_at(frame: FrameType) -> Callable[[str], None]:
    """A function that warns at the line of the user's code that has come to ``frame``, or else at that of ``frame``."""
    place = _place(_user_frame(frame) or frame)
    return lambda message: warnings.warn_explicit(message, UserWarning, *place)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """``frame`` or the nearest of its callers that belongs to none of the libraries. None if all of them do.

    The command line uses the library as a user does.
    """
    while frame is not None and _package(frame) in _PACKAGES | {"contextlib"} and not _name(frame).startswith(_COMMAND):
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> tuple[Any, ...]:
    """What ``warnings.warn_explicit`` is told of the line in ``frame``."""
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), registry


def _package(frame: FrameType) -> str:
    return _name(frame).partition(".")[0]


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
