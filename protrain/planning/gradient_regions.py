"""Regions that gradients of persistent chunks share on the device: how many there must be.

With updates inside backward, a chunk's gradient is needed only from when it begins to arrive until the update is
issued, so persistent chunks need not have a region each. A region is free again when the update is issued, in the order
of the stream, so nothing ever waits for one. Chunks in host memory have a region each. Sharing was tried there, with a
backward that waits for updates. Of 44 recorded cases with updates inside backward it made a plan fit in one.

If gradients of several batches are summed, there are no regions: the sums take the place of gradients.

[Note: open gradients] A gradient is open from the first to the last visit of backward that yields a part of it, and all
that time it holds its region. All gradients of a visit come together, before any of their updates is issued. For some
chunks it isn't known when that time ends. Gradients of a unit that encloses others may come at any time, and its chunks
are held until the enclosed units are done. A parameter that the trace did not use may get no gradient, and then its
chunk is complete only when backward ends. Such chunks count as open all the time.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.planning.rates import gradients_by_visit
from protrain.profiler.model_profile import ModelProfile


def shared_regions(profile: ModelProfile, hardware: HardwareProfile, layout: Layout) -> list[int]:
    """By n_persist, how many regions the gradients of persistent chunks share; 0 if each has its own.

    They share as many as are ever open at once, if these take less than a region for every chunk.
    """
    yielded = gradients_by_visit(profile, hardware, layout)
    is_open = _is_open(profile, layout, [[part.chunk for part in visit] for visit in yielded])
    most_open = [0, *np.cumsum(is_open, axis=0).max(axis=1, initial=0).tolist()]
    own = accumulate((layout.shard_elements(chunk) * chunk.trainable for chunk in layout.chunks), initial=0)
    return [
        n_regions if n_regions * layout.region_elements(n_persist) < elements else 0
        for n_persist, (n_regions, elements) in enumerate(zip(most_open, own, strict=True))
    ]


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
