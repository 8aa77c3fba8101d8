"""When each chunk is needed next, from the order of visits in the profile's trace.

Eviction and prefetch follow one rule, Belady's: give up the buffer whose content is needed last, and fetch ahead only
chunks that are needed before that content. Applied to forward followed by backward, the rule yields the paper's buffer
reuse (buffers full at the end of forward serve the start of backward) without a case of its own. If a step follows
another order than the traced one, that costs a fetch and never changes a result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

FAR = 1 << 60
EMPTY = -1  # the content of a buffer that no chunk is in


def claim(contents: Collection[int], next_use: Callable[[int], int], needed_in: int) -> int | None:
    """The content that is given up for a chunk that is needed in ``needed_in`` visits. None: the chunk must wait.

    The engine's buffers and the predicted fetches both go by this. Only content that is needed later than the chunk is
    given up, and of that what is needed last. Of several chunks that are needed at the same time it is the last one.

    Args:
        contents: the chunks in buffers that nothing uses, and EMPTY if a buffer is empty.
        next_use: in how many visits a chunk is needed.
        needed_in: in how many visits the coming chunk is needed.
    """
    if EMPTY in contents:
        return EMPTY
    later = [(visits, chunk) for chunk in contents if (visits := next_use(chunk)) > needed_in]
    return max(later)[1] if later else None


class Schedule:
    """A cyclic sequence of visits, given by their units, and the position in it.

    A visit is one call of a unit in forward, or the backward of that call.
    """

    def __init__(self, visits: Sequence[int], unit_chunks: Sequence[Sequence[int]]) -> None:
        self.visits = list(visits)
        self._unit_chunks = unit_chunks
        self._of_unit: dict[int, list[int]] = {}
        self._of_chunk: dict[int, list[int]] = {}
        for position, unit in enumerate(self.visits):
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
        """Go on to the next visit of ``unit``, or to its first from ``start`` if the order is not the traced one."""
        positions = self._of_unit.get(unit)
        if positions is None:
            return
        at = bisect_left(positions, max(self.position, start))
        if at == len(positions):
            at = min(bisect_left(positions, start), len(positions) - 1)
        self.position = positions[at]

    def skipped(self, unit: int, *, start: int = 0) -> range | None:
        """The visits between the current one and the next visit of ``unit``, from ``start``. None: it has none.

        A unit that is visited already is its own next visit, as it may run several times in turn.
        """
        positions = self._of_unit.get(unit, [])
        at = bisect_left(positions, max(self.position, start))
        return range(self.position + 1, positions[at]) if at < len(positions) else None

    def next_use(self, chunk: int) -> int:
        """Visits from the current one until ``chunk`` is needed again; FAR if it never is."""
        positions = self._of_chunk.get(chunk)
        if not positions:
            return FAR
        at = bisect_left(positions, self.position + 1)
        if at == len(positions):
            return positions[0] + len(self.visits) - self.position
        return positions[at] - self.position

    def upcoming(self) -> tuple[int, ...]:
        """Chunks in the order in which later visits need them, each once, over one cycle."""
        found = self._upcoming.get(self.position)
        if found is None:
            now = self._unit_chunks[self.visits[self.position]] if self.position >= 0 else ()
            later = [*self.visits[self.position + 1 :], *self.visits[: self.position + 1]]
            needed = dict.fromkeys(chunk for unit in later for chunk in self._unit_chunks[unit])
            found = self._upcoming[self.position] = tuple(chunk for chunk in needed if chunk not in now)
        return found
