"""Which chunk is fetched when, and in whose place: what the engine's buffer pool will do, worked out ahead.

It depends on the placement alone, not on how long anything takes: buffers are given up and filled by the order of use
(:mod:`protrain.planning.schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence

from protrain.planning.layout import Layout
from protrain.planning.schedule import Schedule

# One upload, issued when a visit begins: the chunk, and the one whose buffer it takes; -1: an empty one. A plain tuple,
# as the simulation takes it apart again and again.
Fetch = tuple[int, int]

# What is in buffers, in the order in which it came, and what is in those for large chunks.
Present = tuple[dict[int, None], dict[int, None]]


class Fetches:
    """Fetches of a step in steady state, for any placement of one layout."""

    def __init__(
        self,
        visits: Sequence[int],
        unit_chunks: Sequence[Sequence[int]],
        held: Sequence[tuple[int, ...]],
        layout: Layout,
        n_large: Sequence[int],
    ) -> None:
        self._held = list(held)  # by visit: chunks of its unit, and in forward of the units around it
        self._trainable = [chunk.trainable for chunk in layout.chunks]
        self._is_large = [layout.is_large(chunk) for chunk in layout.chunks]
        self._n_large = n_large  # by n_persist: buffers for large chunks
        schedule = Schedule(visits, unit_chunks)
        self._upcoming: list[tuple[int, ...]] = []  # by position, from before the first visit (index 0) on
        self._next_use: list[list[int]] = []
        for position in range(-1, len(visits)):
            schedule.position = position
            self._upcoming.append(schedule.upcoming())
            self._next_use.append([schedule.next_use(chunk) for chunk in range(len(layout.chunks))])
        self._known: dict[tuple[int, int], list[tuple[Fetch, ...]]] = {}

    def of(self, n_persist: int, n_buffer: int) -> list[tuple[Fetch, ...]]:
        """Per visit its fetches in the order of issue; those before the first visit belong to it.

        Mirrors the engine: a unit takes what it needs, then the pool fetches ahead, nearest use first, into buffers
        that are empty or whose content is needed later than what comes, and stops where there is none. The update makes
        trainable chunks stale.
        """
        known = self._known.get((n_persist, n_buffer))
        if known is None:
            rooms = n_buffer, self._n_large[n_persist]
            present: Present = ({}, {})
            if not all(self._trainable[n_persist:]):  # otherwise none is left from the step before
                self._cycle(present, n_persist, rooms)
                for kind in present:
                    for chunk in [chunk for chunk in kind if self._trainable[chunk]]:
                        del kind[chunk]
            known = self._known[n_persist, n_buffer] = self._cycle(present, n_persist, rooms)
        return known

    def _cycle(self, present: Present, n_persist: int, rooms: tuple[int, int]) -> list[tuple[Fetch, ...]]:
        ahead = self._ahead(present, (), 0, n_persist, rooms)
        fetches = []
        for position, needed in enumerate(self._held):
            held = tuple([chunk for chunk in needed if chunk >= n_persist])
            now = []
            for chunk in held:
                if chunk not in present[self._is_large[chunk]]:
                    victim = self._victim(present, held, position + 1, 0, rooms, chunk)
                    assert victim is not None, "a unit needs more chunks at once than there are buffers"
                    now.append(self._take(present, chunk, victim))
            fetches.append((*ahead, *now, *self._ahead(present, held, position + 1, n_persist, rooms)))
            ahead = []
        return fetches

    def _ahead(
        self, present: Present, held: tuple[int, ...], at: int, n_persist: int, rooms: tuple[int, int]
    ) -> list[Fetch]:
        found: list[Fetch] = []
        if sum(map(len, present)) == len(self._trainable) - n_persist:  # all are there
            return found
        next_use = self._next_use[at]
        for chunk in self._upcoming[at]:
            if chunk < n_persist or chunk in present[self._is_large[chunk]]:
                continue
            victim = self._victim(present, held, at, next_use[chunk], rooms, chunk)
            if victim is None:
                break
            found.append(self._take(present, chunk, victim))
        return found

    def _victim(
        self,
        present: Present,
        held: tuple[int, ...],
        at: int,
        needed_in: int,
        rooms: tuple[int, int],
        coming: int,
    ) -> int | None:
        is_large = self._is_large[coming]
        if len(present[is_large]) < rooms[is_large]:
            return -1
        next_use = self._next_use[at]
        free = [chunk for chunk in present[is_large] if chunk not in held and next_use[chunk] > needed_in]
        return max(free, key=lambda chunk: (next_use[chunk], chunk)) if free else None

    def _take(self, present: Present, chunk: int, victim: int) -> Fetch:
        kind = present[self._is_large[chunk]]
        if victim >= 0:
            del kind[victim]
        kind[chunk] = None
        return chunk, victim
