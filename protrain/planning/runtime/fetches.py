"""Which chunk is fetched when, and whose buffer it takes: what the engine's buffer pool will do, worked out ahead.

Fetches depend on the placement of chunks alone, not on how long anything takes. Buffers are given up and filled by the
order of use (``protrain.planning.schedule``).
"""

from __future__ import annotations

from collections.abc import Sequence

from protrain.planning.layout import Layout
from protrain.planning.schedule import Schedule

# One upload, issued when a visit begins: the chunk, and the chunk whose buffer it takes (-1: an empty buffer). It is a
# plain tuple because the simulation unpacks it in its inner loop.
Fetch = tuple[int, int]

# The chunks in usual buffers, in the order in which they were fetched, and the chunks in buffers for large chunks.
Present = tuple[dict[int, None], dict[int, None]]


class Fetches:
    """Fetches of a step in steady state, for any placement of one layout.

    Args:
        visits: the unit of every visit, forward then backward.
        unit_chunks: by unit, the chunks that hold what it uses.
        held: by visit, the chunks of its unit, and in forward also those of the units that enclose it.
        layout: of the model.
        n_large: by n_persist, the number of buffers for large chunks.
    """

    def __init__(
        self,
        visits: Sequence[int],
        unit_chunks: Sequence[Sequence[int]],
        held: Sequence[tuple[int, ...]],
        layout: Layout,
        n_large: Sequence[int],
    ) -> None:
        self._held = list(held)
        self._trainable = [chunk.trainable for chunk in layout.chunks]
        self._is_large = [layout.is_large(chunk) for chunk in layout.chunks]
        self._n_large = n_large
        schedule = Schedule(visits, unit_chunks)
        self._upcoming: list[tuple[int, ...]] = []  # by position; index 0 is before the first visit
        self._next_use: list[list[int]] = []
        for position in range(-1, len(visits)):
            schedule.position = position
            self._upcoming.append(schedule.upcoming())
            self._next_use.append([schedule.next_use(chunk) for chunk in range(len(layout.chunks))])

    def of(self, n_persist: int, n_buffer: int) -> list[tuple[Fetch, ...]]:
        """Per visit its fetches in the order of issue. Fetches before the first visit belong to the first visit.

        They mirror the engine. A unit fetches what it needs. Then the pool fetches ahead, nearest use first, into
        buffers that are empty or whose content is needed later than the chunk that is fetched, until there is no such
        buffer. The update makes the weights of trainable chunks in buffers stale.
        """
        rooms = n_buffer, self._n_large[n_persist]
        present: Present = ({}, {})
        if not all(self._trainable[n_persist:]):  # only frozen chunks are still valid after the step before
            self._cycle(present, n_persist, rooms)
            for kind in present:
                for chunk in [chunk for chunk in kind if self._trainable[chunk]]:
                    del kind[chunk]
        return self._cycle(present, n_persist, rooms)

    def _cycle(self, present: Present, n_persist: int, rooms: tuple[int, int]) -> list[tuple[Fetch, ...]]:
        """The fetches of one step that begins with ``present``, which is changed to what the step ends with."""
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
        """The chunks that are fetched ahead at one position, while its visit holds the chunks ``held``."""
        found: list[Fetch] = []
        if sum(map(len, present)) == len(self._trainable) - n_persist:  # every non-persistent chunk is in a buffer
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
        """The chunk whose buffer ``coming`` takes, -1 for an empty buffer, None if ``coming`` must wait.

        ``coming`` is needed in ``needed_in`` visits, and only content that is needed later is given up for it.
        """
        is_large = self._is_large[coming]
        if len(present[is_large]) < rooms[is_large]:
            return -1
        next_use = self._next_use[at]
        evictable = [chunk for chunk in present[is_large] if chunk not in held and next_use[chunk] > needed_in]
        return max(evictable, key=lambda chunk: (next_use[chunk], chunk)) if evictable else None

    def _take(self, present: Present, chunk: int, victim: int) -> Fetch:
        kind = present[self._is_large[chunk]]
        if victim >= 0:
            del kind[victim]
        kind[chunk] = None
        return chunk, victim
