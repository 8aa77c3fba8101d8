"""States with names, of which each tells which may follow it."""

from __future__ import annotations

import enum
from typing import Self


class State(enum.Enum):
    """A state of one of the engine's objects.

    A member's value is its name in messages, and after that the names of the states that may follow it.
    """

    def __init__(self, label: str, *followers: str) -> None:
        self.label = label
        self.followers = followers

    def become(self, new: Self) -> Self:
        """Return ``new``, which must be a follower. An illegal transition is a bug of the engine."""
        assert new.label in self.followers, f"illegal {type(self).__name__} transition {self.label} -> {new.label}"
        return new
