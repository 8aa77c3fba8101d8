"""Which chunk is fetched when, and in whose place: what the engine's buffer pool will do, worked out ahead.

It depends on the placement alone, not on how long anything takes: buffers are given up and filled by the order of use
(:mod:`protrain.planning.schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence

from protrain.planning.schedule import Schedule

# One upload, issued when a visit begins: the chunk, and the one whose buffer it takes; -1: an empty one. A plain tuple,
# as the simulation takes it apart again and again.
Fetch = tuple[int, int]


class Fetches:
    """Fetches of a step in steady state, for any placement of one layout."""

    def __init__(
        self,
        visits: Sequence[int],
        unit_chunks: Sequence[Sequence[int]],
        held: Sequence[tuple[int, ...]],
        trainable: Sequence[bool],
    ) -> None:
        self._held = list(held)  # by visit: chunks of its unit, and in forward of the units around it
        self._trainable = list(trainable)
        schedule = Schedule(visits, unit_chunks)
        self._upcoming: list[list[int]] = []  # by position, from before the first visit (index 0) on
        self._next_use: list[list[int]] = []
        for position in range(-1, len(visits)):
            schedule.position = position
            self._upcoming.append(list(schedule.upcoming()))
            self._next_use.append([schedule.next_use(chunk) for chunk in range(len(trainable))])
        self._known: dict[tuple[int, int], list[tuple[Fetch, ...]]] = {}

    def of(self, n_persist: int, n_buffer: int) -> list[tuple[Fetch, ...]]:
        """Per visit its fetches in the order of issue; those before the first visit belong to it.

        Mirrors the engine: a unit takes what it needs, then the pool fetches ahead, nearest use first, into buffers
        that are empty or whose content is needed later than what comes. The update makes trainable chunks stale.
        """
        known = self._known.get((n_persist, n_buffer))
        if known is None:
            present: dict[int, None] = {}  # in the order in which they came
            if not all(self._trainable[n_persist:]):  # otherwise none is left from the step before
                self._cycle(present, n_persist, n_buffer)
                present = {chunk: None for chunk in present if not self._trainable[chunk]}
            known = self._known[n_persist, n_buffer] = self._cycle(present, n_persist, n_buffer)
        return known

    def _cycle(self, present: dict[int, None], n_persist: int, n_buffer: int) -> list[tuple[Fetch, ...]]:
        ahead = self._ahead(present, (), 0, n_persist, n_buffer)
        fetches = []
        for position, needed in enumerate(self._held):
            held = tuple([chunk for chunk in needed if chunk >= n_persist])
            now = []
            for chunk in held:
                if chunk not in present:
                    victim = self._victim(present, held, position + 1, 0, n_buffer)
                    assert victim is not None, "a unit needs more chunks at once than there are buffers"
                    now.append(self._take(present, chunk, victim))
            fetches.append((*ahead, *now, *self._ahead(present, held, position + 1, n_persist, n_buffer)))
            ahead = []
        return fetches

    def _ahead(
        self, present: dict[int, None], held: tuple[int, ...], at: int, n_persist: int, n_buffer: int
    ) -> list[Fetch]:
        found: list[Fetch] = []
        if len(present) == len(self._trainable) - n_persist:  # all are there
            return found
        next_use = self._next_use[at]
        for chunk in self._upcoming[at]:
            if chunk < n_persist or chunk in present:
                continue
            victim = self._victim(present, held, at, next_use[chunk], n_buffer)
            if victim is None:
                break
            found.append(self._take(present, chunk, victim))
        return found

    def _victim(
        self, present: dict[int, None], held: tuple[int, ...], at: int, needed_in: int, n_buffer: int
    ) -> int | None:
        if len(present) < n_buffer:
            return -1
        next_use = self._next_use[at]
        free = [chunk for chunk in present if chunk not in held and next_use[chunk] > needed_in]
        return max(free, key=next_use.__getitem__) if free else None

    @staticmethod
    def _take(present: dict[int, None], chunk: int, victim: int) -> Fetch:
        if victim >= 0:
            del present[victim]
        present[chunk] = None
        return chunk, victim
