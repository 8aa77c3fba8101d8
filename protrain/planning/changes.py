"""The neighbours of a plan: plans with one integer changed by one.

The what-if table shows them. The search ends by trying them, so that no neighbour of its plan is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from protrain.common.records import Record
from protrain.planning.plan import Counts
from protrain.planning.predict import Models
from protrain.planning.ranges import ranges, within


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One integer changed by one, or keep_attention flipped. Only the what-if table has what the change does."""

    knob: str
    step: int  # 1 or -1
    counts: tuple[int, ...]  # in the order of Counts
    impossible: str = ""  # the reason if there is no such plan; then no field below is set
    step_ms: float | None = None
    slower_ms: float | None = None  # on the slower host that plans are made for
    device_bytes: int = 0
    host_bytes: int = 0
    device_over_bytes: int = 0  # how much more than there is; 0 if it fits
    host_over_bytes: int = 0


def neighbours(counts: Counts, models: Models) -> Iterator[Change]:
    """All neighbours of ``counts``, whether they fit the memory or not, with a reason if there is no such plan.

    If the changed integer puts another one out of its range, that one takes the nearest value in the range: buffers
    speculative updates and sums with another number of persistent chunks, offloaded inputs with fewer recomputed
    blocks.
    """
    for knob in Counts._fields:
        if knob == "n_device_sum" and not models.memory.accumulates:
            continue  # a step of one backward has no sums
        for step in (1, -1):
            wanted = counts._replace(**{knob: getattr(counts, knob) + step})
            impossible = ranges(wanted, models)[knob].why_not(getattr(wanted, knob))
            changed = wanted if impossible else within(wanted, models)
            if knob == "n_weight_only" and wanted.n_weight_only < changed.n_weight_only:
                impossible = "host memory has no room for another whole second copy"
            yield Change(knob=knob, step=step, counts=changed, impossible=impossible)
