"""Replaces attributes of single objects, and puts the old ones back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def replace_attributes(replacements: Iterable[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set each (object, name, value). Returns a function that restores the attributes that were there before."""
    before = []
    for owner, name, value in replacements:
        attributes = vars(owner)
        before.append((attributes, name, name in attributes, attributes.get(name)))
        attributes[name] = value

    def put_back() -> None:
        for attributes, name, was_there, value in reversed(before):
            if was_there:
                attributes[name] = value
            else:
                del attributes[name]

    return put_back
