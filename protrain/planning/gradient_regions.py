"""Regions that gradients share: how many there must be, and which gradient takes whose region.

With updates inside backward, a chunk's gradient is needed only from when it begins to arrive until the update is done,
so chunks need not have a region each. Persistent chunks share regions on the device. A region there is free again when
the update is issued, in the order of the stream, so nothing ever waits for one. Chunks in host memory share regions
there. A region there is free again when the update is done, on the host or by the GPU, and while none is free the step
waits. Large chunks in host memory (``protrain.planning.layout``), of which there are one or two, have a region each.

If gradients of several batches are summed, there are no regions: the sums take the place of gradients.

[Note: open gradients] A gradient is open from the first to the last visit of backward that yields a part of it, and all
that time it holds its region. All gradients of a visit come together, before any of their updates is issued. For some
chunks it isn't known when that time ends. Gradients of a unit that encloses others may come at any time, and its chunks
are held until the enclosed units are done. A parameter that the trace did not use may get no gradient, and then its
chunk is complete only when backward ends. Such chunks count as open all the time. Host memory has at least one region
more than are ever open at once, so that one chunk's update can run while the gradients of the next arrive, and so that
there always is an update to wait for.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.planning.rates import gradients_by_visit
from protrain.profiler.model_profile import ModelProfile


class GradientRegions:
    """Regions for one model in one layout. A number of regions is 0 if every chunk has its own.

    Chunks share regions only if updates run inside backward. Otherwise every gradient stays until the norm is known.

    Args:
        profile: of the model.
        hardware: the machine.
        layout: of the model.
    """

    def __init__(self, profile: ModelProfile, hardware: HardwareProfile, layout: Layout) -> None:
        element, placements = profile.element_bytes, range(len(layout.chunks) + 1)
        # By n_persist: bytes of a region on the device, and of a region in host memory.
        self._region_bytes = [
            (here * element, away * element) for here, away in map(layout.region_elements, placements)
        ]
        self._is_large = is_large = [layout.is_large(chunk) for chunk in layout.chunks]
        is_alone = profile.accumulation == 1  # sums of several batches take the place of gradients
        own = [layout.shard_elements(chunk) * element * (chunk.trainable and is_alone) for chunk in layout.chunks]
        # By n_persist: gradient bytes of usual persistent chunks, and of large ones, with a region for every chunk.
        self._usual_bytes, self._large_bytes = (
            list(accumulate((size * (large is kind) for size, large in zip(own, is_large, strict=True)), initial=0))
            for kind in (False, True)
        )
        self._shared = profile.step_during_backward and is_alone  # whether chunks share regions
        if self._shared:
            self._yielded = gradients_by_visit(profile, hardware, layout)
            is_open = _is_open(profile, layout, [[part.chunk for part in visit] for visit in self._yielded])
            # By n_persist: the most gradients that are open at once, on the device and in host memory.
            before = _up_to(is_open)
            self.open_on_device: list[int] = before.max(axis=1, initial=0).tolist()
            before = _up_to(is_open & ~np.array(is_large)[:, None])
            self.open_on_host: list[int] = (before[-1] - before).max(axis=1, initial=0).tolist()
            self._last_visit = [max(np.flatnonzero(visits).tolist(), default=-1) for visits in is_open]  # by chunk
        self.handed_on = cache(self._handed_on)

    def n_on_device(self, n_persist: int) -> int:
        """The number of regions that persistent chunks share."""
        if not self._shared:
            return 0
        own_bytes = self._usual_bytes[n_persist] + self._large_bytes[n_persist]
        return _fewer(self.open_on_device[n_persist], self._region_bytes[n_persist][0], own_bytes)

    def device_bytes(self, n_persist: int) -> int:
        """Bytes of the gradients of persistent chunks."""
        shared_bytes = self.n_on_device(n_persist) * self._region_bytes[n_persist][0]
        return shared_bytes or self._usual_bytes[n_persist] + self._large_bytes[n_persist]

    def n_on_host(self, n_persist: int, free_bytes: int = 0) -> int:
        """The number of regions that chunks in host memory share: the fewest, and those that fit ``free_bytes``."""
        region_bytes = self._region_bytes[n_persist][1]
        if not self._shared or not region_bytes:
            return 0
        n_more, rest_bytes = divmod(max(0, free_bytes), region_bytes)
        # The rest that is too small for another region may be enough for every chunk to have its own.
        own_bytes = self._usual_bytes[-1] - self._usual_bytes[n_persist] - rest_bytes
        return _fewer(self.open_on_host[n_persist] + 1 + n_more, region_bytes, own_bytes)

    def host_bytes(self, n_persist: int, n_regions: int) -> int:
        """Bytes of the gradients of chunks in host memory, in ``n_regions``."""
        usual_bytes = n_regions * self._region_bytes[n_persist][1]
        usual_bytes = usual_bytes or self._usual_bytes[-1] - self._usual_bytes[n_persist]
        return usual_bytes + self._large_bytes[-1] - self._large_bytes[n_persist]

    def _handed_on(self, n_persist: int, n_regions: int) -> list[tuple[int, int]]:
        """The gradients that take over another chunk's region, as (gradient, the chunk whose update it waits for).

        They come in the order in which they arrive. A gradient is given by the number of its ``GradientPart``.
        It takes over the region of the chunk whose gradient has been complete for the longest time, so this depends on
        the order of gradients alone.
        """
        found: list[tuple[int, int]] = []
        if not n_regions:
            return found
        seen: set[int] = set()
        complete: deque[int] = deque()
        for at, visit in enumerate(self._yielded):
            away = [part for part in visit if part.chunk >= n_persist and not self._is_large[part.chunk]]
            for part in away:
                if part.chunk in seen:
                    continue
                seen.add(part.chunk)
                if len(seen) > n_regions:
                    assert complete, "more gradients are open at once than there are regions"
                    found.append((part.number, complete.popleft()))
            complete.extend(part.chunk for part in away if self._last_visit[part.chunk] == at)
        return found


def _up_to(is_open: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[n, visit of backward]: how many of the first n chunks are open."""
    before = np.zeros((is_open.shape[0] + 1, is_open.shape[1]), dtype=np.int64)
    np.cumsum(is_open, axis=0, out=before[1:])
    return before


def _fewer(n_regions: int, region_bytes: int, own_bytes: int) -> int:
    """``n_regions`` if they take less than a region for every chunk takes, else 0."""
    return n_regions if n_regions * region_bytes < own_bytes else 0


def _is_open(profile: ModelProfile, layout: Layout, yielded: list[list[int]]) -> NDArray[np.bool_]:
    """Whether a trainable chunk's gradient is open, as [chunk, visit of backward]. See [Note: open gradients].

    ``yielded`` says by visit which chunks its gradients belong to.
    """
    is_open = np.zeros((len(layout.chunks), len(yielded)), dtype=np.bool_)
    visits_of: dict[int, list[int]] = {}
    for at, chunks in enumerate(yielded):
        for chunk in chunks:
            visits_of.setdefault(chunk, []).append(at)
    for chunk, visits in visits_of.items():
        is_open[chunk, visits[0] : visits[-1] + 1] = True
    at_any_time = set(layout.held_by(profile.enclosing))
    used = {parameter for unit in profile.calls for parameter in profile.units[unit].parameters}
    at_any_time.update(slot.chunk for slot in layout.slots if slot.parameter not in used)
    for chunk in at_any_time:
        is_open[chunk] = layout.chunks[chunk].trainable
    return is_open
