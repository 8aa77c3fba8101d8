"""Which chunk is fetched when, and whose buffer it takes: what the engine's buffer pool will do, worked out ahead.

Fetches depend on the placement of chunks alone, not on how long anything takes. Buffers are given up and filled by the
order of use (``protrain.planning.schedule``).
"""

from __future__ import annotations

from collections.abc import Sequence

from protrain.planning.layout import Layout
from protrain.planning.schedule import EMPTY, Schedule, claim

# One upload, issued when a visit begins: the chunk, and the chunk whose buffer it takes (-1: an empty buffer). It is a
# plain tuple because the simulation unpacks it in its inner loop.
Fetch = tuple[int, int]


class Fetches:
    """Fetches of a step in steady state, for any placement of one layout.

    Args:
        visits: the unit of every visit, forward then backward.
        held: by visit, the chunks of its unit, and those that are held at that time for units that enclose others.
        layout: of the model.
        n_large: by n_persist, the number of buffers for large chunks.
    """

    def __init__(
        self, visits: Sequence[int], held: Sequence[tuple[int, ...]], layout: Layout, n_large: Sequence[int]
    ) -> None:
        self.held = held
        self.is_large = [layout.is_large(chunk) for chunk in layout.chunks]
        self._trainable = [chunk.trainable for chunk in layout.chunks]
        self._n_large = n_large
        schedule = Schedule(visits, layout.unit_chunks)
        self.upcoming: list[tuple[int, ...]] = []  # by position; index 0 is before the first visit
        self.next_use: list[list[int]] = []
        for position in range(-1, len(visits)):
            schedule.position = position
            self.upcoming.append(schedule.upcoming())
            self.next_use.append([schedule.next_use(chunk) for chunk in range(len(layout.chunks))])

    def of(self, n_persist: int, n_buffer: int, *, after_update: bool = True) -> list[tuple[Fetch, ...]]:
        """Per visit its fetches in the order of issue. Fetches before the first visit belong to the first visit.

        They mirror the engine. A unit fetches what it needs. Then the pool fetches ahead, nearest use first, into
        buffers that are empty or whose content is needed later than the chunk that is fetched, until there is no such
        buffer. An update makes the weights of trainable chunks in buffers stale. Without ``after_update`` these are
        still valid, as in the forwards of a step of several batches that follow its first.
        """
        pool = _Pool(self, n_persist, (n_buffer, self._n_large[n_persist]))
        if not after_update:
            pool.step()
        elif not all(self._trainable[n_persist:]):  # only frozen chunks are still valid after the step before
            pool.step()
            for kind in pool.present:
                for chunk in [chunk for chunk in kind if self._trainable[chunk]]:
                    del kind[chunk]
        return pool.step()


class _Pool:
    """The buffers of one placement. ``rooms`` are their numbers, of usual ones and of those for large chunks."""

    def __init__(self, fetches: Fetches, n_persist: int, rooms: tuple[int, int]) -> None:
        self._fetches, self._n_persist, self._rooms = fetches, n_persist, rooms
        self._is_large = fetches.is_large
        # The chunks in usual buffers, in the order in which they were fetched, and those in buffers for large chunks.
        self.present: tuple[dict[int, None], dict[int, None]] = ({}, {})

    def step(self) -> list[tuple[Fetch, ...]]:
        """The fetches of one step."""
        ahead = self._ahead((), 0)
        found = []
        for position, needed in enumerate(self._fetches.held):
            held = tuple([chunk for chunk in needed if chunk >= self._n_persist])
            now = []
            for chunk in held:
                if chunk not in self.present[self._is_large[chunk]]:
                    victim = self._victim(chunk, held, position + 1, 0)
                    assert victim is not None, "a unit needs more chunks at once than there are buffers"
                    now.append(self._take(chunk, victim))
            found.append((*ahead, *now, *self._ahead(held, position + 1)))
            ahead = []
        return found

    def _ahead(self, held: tuple[int, ...], at: int) -> list[Fetch]:
        """The chunks that are fetched ahead at one position, while its visit holds the chunks ``held``."""
        found: list[Fetch] = []
        if sum(map(len, self.present)) == len(self._is_large) - self._n_persist:
            return found  # every non-persistent chunk is in a buffer
        next_use = self._fetches.next_use[at]
        for chunk in self._fetches.upcoming[at]:
            if chunk < self._n_persist or chunk in self.present[self._is_large[chunk]]:
                continue
            victim = self._victim(chunk, held, at, next_use[chunk])
            if victim is None:
                break
            found.append(self._take(chunk, victim))
        return found

    def _victim(self, coming: int, held: tuple[int, ...], at: int, needed_in: int) -> int | None:
        """The chunk whose buffer ``coming`` takes, -1 for an empty buffer, None if ``coming`` must wait.

        ``coming`` is needed in ``needed_in`` visits, and only content that is needed later is given up for it.
        """
        is_large = self._is_large[coming]
        present = self.present[is_large]
        if len(present) < self._rooms[is_large]:
            return EMPTY
        unused = [chunk for chunk in present if chunk not in held]
        return claim(unused, self._fetches.next_use[at].__getitem__, needed_in)

    def _take(self, chunk: int, victim: int) -> Fetch:
        present = self.present[self._is_large[chunk]]
        if victim >= 0:
            del present[victim]
        present[chunk] = None
        return chunk, victim
