"""Regions that gradients share while updates run inside backward: how many there must be, and whose each was before.

Where gradients of several batches are summed, those of chunks in host memory share regions too: one is given back when
the host has added it to the chunk's accumulator, in place of an update. On the device they are added at once.

With updates inside backward a chunk's gradient is needed only from when it begins to arrive until the update is done,
so chunks need not each have room for it. Persistent chunks share regions on the device: one is given back when the
update is issued, in the order of the stream, so that nothing ever waits for it. Chunks in host memory share regions
there: one is given back when the update is done, on the host or by the device, and while none is free the step waits.
There large chunks (:mod:`protrain.planning.layout`), of which there are one or two, each have their own.

[Note: open gradients] A chunk holds its region from the first to the last turn of backward that yields a gradient of
it; all of a turn's gradients come together, before any of their updates is issued. Of some chunks it isn't known when
that is: gradients of a unit that encloses others may come at any time, and its chunks are held until those others are
through; what the trace did not use may get none, and then a chunk is complete when backward is over. They count as open
all the time. In host memory there is at least one region more than are ever open at once, so that one chunk's update
can run while the gradients of the next arrive, and so that there always is an update to wait for.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.planning.rates.visits import gradients_by_visit
from protrain.profiler.model_profile import ModelProfile


class GradientRegions:
    """For one model in one layout. Counts of regions are 0 where every chunk has its own.

    Args:
        profile: of the model.
        hardware: the machine.
        layout: of the model.
        update_in_backward: whether updates run inside backward; otherwise every gradient is there until the norm is
            known, or until it has been added to others.
    """

    def __init__(
        self, profile: ModelProfile, hardware: HardwareProfile, layout: Layout, *, update_in_backward: bool
    ) -> None:
        element, placements = profile.element_bytes, range(len(layout.chunks) + 1)
        # By n_persist: of a region on the device, and of one in host memory.
        self._region_bytes = [
            (here * element, away * element) for here, away in map(layout.region_elements, placements)
        ]
        self._is_large = is_large = [layout.is_large(chunk) for chunk in layout.chunks]
        own = [chunk.elements * element if chunk.trainable else 0 for chunk in layout.chunks]
        large = [size * alone for size, alone in zip(own, is_large, strict=True)]
        # Of the chunks before: of all, and of those that share none in host memory.
        self._own, self._large = list(accumulate(own, initial=0)), list(accumulate(large, initial=0))
        self._adds = profile.accumulation > 1
        self._shared = update_in_backward or self._adds
        if self._shared:
            gradients, of_visit = gradients_by_visit(profile, hardware, layout)
            self._yielded = [[(index, gradients[index][0]) for index in visit] for visit in of_visit]
            is_open = _is_open(profile, layout, [[chunk for _, chunk in visit] for visit in self._yielded])
            # By n_persist: the most that are open at once on either side.
            before = _up_to(is_open)
            self.open_on_device: list[int] = before.max(axis=1, initial=0).tolist()
            before = _up_to(is_open & ~np.array(is_large)[:, None])
            self.open_on_host: list[int] = (before[-1] - before).max(axis=1, initial=0).tolist()
            self._last_visit = [max(np.flatnonzero(turns).tolist(), default=-1) for turns in is_open]  # by chunk
        self._known: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by n_persist and n_regions

    def own_bytes(self, n_persist: int) -> tuple[int, int]:
        """What they take on the device and in host memory where every chunk has its own."""
        return self._own[n_persist], self._own[-1] - self._own[n_persist]

    def on_device(self, n_persist: int) -> int:
        """Regions that persistent chunks share."""
        if not self._shared or self._adds:
            return 0
        return _fewer(self.open_on_device[n_persist], self._region_bytes[n_persist][0], self._own[n_persist])

    def device_bytes(self, n_persist: int) -> int:
        """Of the gradients of persistent chunks, where nothing is added to them."""
        return self.on_device(n_persist) * self._region_bytes[n_persist][0] or self._own[n_persist]

    def on_host(self, n_persist: int, spare_bytes: int = 0) -> int:
        """Regions that the other chunks share: the least there must be, and as many more as fit ``spare_bytes``.

        No more where gradients are added to others, which takes less time than they take to arrive.
        """
        region_bytes = self._region_bytes[n_persist][1]
        if not self._shared or not region_bytes:
            return 0
        if self._adds:
            spare_bytes = 0
        n_more = max(0, spare_bytes) // region_bytes
        # What does not make another region may yet be enough for all to have their own.
        own_bytes = self.own_bytes(n_persist)[1] - self._large_on_host(n_persist) - max(0, spare_bytes) % region_bytes
        return _fewer(self.open_on_host[n_persist] + 1 + n_more, region_bytes, own_bytes)

    def host_bytes(self, n_persist: int, n_regions: int) -> int:
        """Of the gradients of the other chunks."""
        if n_regions:
            return n_regions * self._region_bytes[n_persist][1] + self._large_on_host(n_persist)
        return self.own_bytes(n_persist)[1]

    def _large_on_host(self, n_persist: int) -> int:
        return self._large[-1] - self._large[n_persist]

    def handed_on(self, n_persist: int, n_regions: int) -> list[tuple[int, int]]:
        """Which gradients take a region that is not free before an update: (gradient, the chunk that is updated).

        Gradients by their index in those of :func:`gradients_by_visit`, in the order in which they come. Whose region
        a chunk takes depends on that order alone: it is that of the chunk that has been complete for the longest time.
        """
        known = self._known.get((n_persist, n_regions))
        if known is None:
            known = self._known[n_persist, n_regions] = self._handed_on(n_persist, n_regions) if n_regions else []
        return known

    def _handed_on(self, n_persist: int, n_regions: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        complete: deque[int] = deque()
        for at, visit in enumerate(self._yielded):
            away = [(index, chunk) for index, chunk in visit if chunk >= n_persist and not self._is_large[chunk]]
            for index, chunk in away:
                if chunk in seen:
                    continue
                seen.add(chunk)
                if len(seen) > n_regions:
                    assert complete, "more gradients are open at once than there are regions"
                    found.append((index, complete.popleft()))
            complete.extend(chunk for _, chunk in away if self._last_visit[chunk] == at)
        return found


def _up_to(is_open: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[chunks before, visit of backward]: how many of those are open."""
    before = np.zeros((is_open.shape[0] + 1, is_open.shape[1]), dtype=np.int64)
    np.cumsum(is_open, axis=0, out=before[1:])
    return before


def _fewer(n_regions: int, region_bytes: int, own_bytes: int) -> int:
    return n_regions if n_regions * region_bytes < own_bytes else 0


def _is_open(profile: ModelProfile, layout: Layout, yielded: list[list[int]]) -> NDArray[np.bool_]:
    """[chunk, visit of backward], of all trainable chunks. See [Note: open gradients].

    ``yielded`` has, by visit, the chunks of its gradients.
    """
    is_open = np.zeros((len(layout.chunks), len(yielded)), dtype=np.bool_)
    visits: dict[int, list[int]] = {}
    for at, chunks in enumerate(yielded):
        for chunk in chunks:
            visits.setdefault(chunk, []).append(at)
    for chunk, turns in visits.items():
        is_open[chunk, turns[0] : turns[-1] + 1] = True
    enclosing = {outer for unit in profile.units for outer in unit.within}
    at_any_time = {chunk for unit in enclosing for chunk in layout.unit_chunks[unit]}
    used = {parameter for unit in profile.calls for parameter in profile.units[unit].parameters}
    at_any_time.update(slot.chunk for slot in layout.slots if slot.parameter not in used)
    for chunk in at_any_time:
        is_open[chunk] = layout.chunks[chunk].trainable
    return is_open
