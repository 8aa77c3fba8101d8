"""Who needs a chunk next: the order of one training step, from the profile's trace.

Eviction and prefetch are decided by one rule, Belady's: give up the buffer whose content is needed last, and fetch
ahead only what is needed before that. Applied to forward followed by backward it yields the paper's buffer reuse
(buffers full at the end of forward serve the start of backward) without a case of its own. A wrong guess costs a
fetch, never a result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FAR = 1 << 60


class Schedule:
    """A cyclic sequence of unit visits and the position in it."""

    def __init__(self, visits: Sequence[int], unit_chunks: Sequence[Sequence[int]]) -> None:
        self._visits = list(visits)
        self._unit_chunks = unit_chunks
        self._of_unit: dict[int, list[int]] = {}
        self._of_chunk: dict[int, list[int]] = {}
        for position, unit in enumerate(self._visits):
            self._of_unit.setdefault(unit, []).append(position)
            for chunk in unit_chunks[unit]:
                positions = self._of_chunk.setdefault(chunk, [])
                if not positions or positions[-1] != position:
                    positions.append(position)
        self.position = -1  # before the first visit
        self._upcoming: dict[int, tuple[int, ...]] = {}  # by position

    def restart(self) -> None:
        """Go back to before the first visit."""
        self.position = -1

    def enter(self, unit: int, *, start: int = 0) -> None:
        """Move to the next visit of ``unit``, or its first one from ``start`` when the order is not the traced one."""
        positions = self._of_unit.get(unit)
        if positions is None:
            return
        at = bisect_left(positions, max(self.position, start))
        if at == len(positions):
            at = min(bisect_left(positions, start), len(positions) - 1)
        self.position = positions[at]

    def next_use(self, chunk: int) -> int:
        """Visits until ``chunk`` is needed after the current visit; FAR when it never is."""
        positions = self._of_chunk.get(chunk)
        if not positions:
            return FAR
        at = bisect_left(positions, self.position + 1)
        if at == len(positions):
            return positions[0] + len(self._visits) - self.position
        return positions[at] - self.position

    def upcoming(self) -> tuple[int, ...]:
        """Chunks in the order in which later visits need them, each once, over one cycle."""
        found = self._upcoming.get(self.position)
        if found is None:
            now = self._unit_chunks[self._visits[self.position]] if self.position >= 0 else ()
            later = [*self._visits[self.position + 1 :], *self._visits[: self.position + 1]]
            needed = dict.fromkeys(chunk for unit in later for chunk in self._unit_chunks[unit])
            found = self._upcoming[self.position] = tuple(chunk for chunk in needed if chunk not in now)
        return found
