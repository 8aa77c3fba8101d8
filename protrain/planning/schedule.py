"""When each chunk is needed next, from the order of visits in the profile's trace.

Eviction and prefetch follow one rule, Belady's: give up the buffer whose content is needed last, and fetch ahead only
chunks that are needed before that content. Applied to forward followed by backward, the rule yields the paper's buffer
reuse (buffers full at the end of forward serve the start of backward) without a case of its own. If a step follows
another order than the traced one, that costs a fetch and never changes a result.

``Fetches`` works out ahead which chunk the engine's buffer pool will fetch when, and whose buffer the chunk takes. That
depends on the placement of chunks alone, not on how long anything takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from protrain.planning.layout import Layout
from protrain.profiler.model_profile import ModelProfile

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


def most_held(profile: ModelProfile, layout: Layout) -> list[tuple[int, int]]:
    """By n_persist: the most chunks in buffers that are held at one time, usual ones and large ones.

    A unit holds its own chunks, and those of the units that enclose it are held as well. For a unit that the trace did
    not call, these are all units whose module contains its module. Several ranks hold those of all units that enclose
    any during the whole backward.
    """
    called = set(profile.calls)
    in_backward = profile.enclosing if layout.world_size > 1 else ()
    held_sets = set()
    for index, unit in enumerate(profile.units):
        active = (index, *unit.within)
        if index not in called:
            modules = [other.name for other in profile.units]
            active = tuple(at for at, name in enumerate(modules) if not name or f"{unit.name}.".startswith(f"{name}."))
        held_sets.add(layout.held_by((*active, *in_backward)))
    usual, large = (
        [[chunk for chunk in held if layout.is_large(layout.chunks[chunk]) is kind] for held in held_sets]
        for kind in (False, True)
    )

    def most(kind: list[list[int]], first: int) -> int:
        return max((len(held) - bisect_left(held, first) for held in kind), default=0)

    firsts = map(layout.first_buffered, range(len(layout.chunks) + 1))
    return [(most(usual, first), most(large, first)) for first in firsts]


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
        pool.step()  # the step before
        for kind in pool.present:
            for chunk in [chunk for chunk in kind if after_update and self._trainable[chunk]]:
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
        present.pop(victim, None)
        present[chunk] = None
        return chunk, victim
