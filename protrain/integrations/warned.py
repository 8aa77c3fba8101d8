"""Lets warnings of ProTrain name the line of the user's code, where a training library stands between the two."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "sentence_transformers", "torch")
_PACKAGES = frozenset({"protrain", "transformers", "trl", *_LIBRARIES})


@contextmanager
def warned_at_user() -> Iterator[None]:
    """Show the warnings that ProTrain gives inside at the line where the user's code has called the library.

    They would otherwise show the line of this package that calls ``wrap``, which tells a user nothing. They are shown
    when the work inside has ended.
    """
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        frame, ours = _user_frame(sys._getframe()), Path(__file__).parents[1]
        for one in caught:
            place: tuple[Any, ...] = one.filename, one.lineno
            if frame is not None and Path(one.filename).is_relative_to(ours):
                registry = frame.f_globals.setdefault("__warningregistry__", {})
                place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), registry
            warnings.warn_explicit(one.message, one.category, *place)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """``frame`` or the nearest of its callers that belongs to none of the libraries. None if all of them do."""
    while frame is not None and _package(frame) in _PACKAGES | {"contextlib"}:
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
