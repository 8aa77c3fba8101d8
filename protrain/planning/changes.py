"""The neighbours of a plan: plans with one integer changed by one.

The what-if table shows them. The search ends by trying them, so that no neighbour of its plan is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from protrain.common.records import Record
from protrain.planning.plan import Counts
from protrain.planning.predict import Models


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
            if impossible := _impossible(wanted, knob, models):
                yield Change(knob=knob, step=step, counts=wanted, impossible=impossible)
                continue
            changed = within(wanted, models)
            refused = ""
            if knob == "n_buffer" and wanted.n_buffer < changed.n_buffer:
                refused = f"a unit holds up to {changed.n_buffer} {models.memory.buffered}s at once"
            elif knob == "n_buffer" and wanted.n_buffer > changed.n_buffer:
                refused = f"every {models.memory.buffered} has a buffer"
            elif knob == "n_weight_only" and wanted.n_weight_only < changed.n_weight_only:
                refused = "host memory has no room for another whole second copy"
            yield Change(knob=knob, step=step, counts=changed, impossible=refused)


def within(wanted: Counts, models: Models) -> Counts:
    """``wanted`` with every integer in the range that the layout and the other integers allow."""
    memory, n_persist = models.memory, wanted.n_persist
    n_buffer = min(max(wanted.n_buffer, memory.least_buffers(n_persist)), memory.all_buffers(n_persist))
    n_speculate = min(wanted.n_speculate, models.n_chunks - n_persist)
    counts = wanted._replace(
        n_buffer=n_buffer,
        n_ckpt_swap=min(wanted.n_ckpt_swap, wanted.n_ckpt),
        n_speculate=n_speculate,
    )
    n_device_sum = min(wanted.n_device_sum, models.n_chunks - n_persist)
    swapped_bytes = memory.swapped_bytes(models.modes(counts))
    fit, least = memory.speculation(n_persist, n_speculate, swapped_bytes, n_device_sum)
    least = least if fit == n_speculate else n_speculate
    n_weight_only = min(max(wanted.n_weight_only, least), n_speculate)
    return counts._replace(n_weight_only=n_weight_only, n_device_sum=n_device_sum)


def _impossible(counts: Counts, knob: str, models: Models) -> str:
    """The reason if ``knob`` cannot have its value in ``counts``, else ""."""
    runtime, n_chunks = models.runtime, models.n_chunks
    if getattr(counts, knob) < 0:
        return "there is none to give up"
    if counts.n_persist > n_chunks:
        return "all chunks are persistent"
    if knob == "n_speculate" and not runtime.speculates:
        return "no update waits for step()"
    if knob == "n_speculate" and counts.n_speculate > n_chunks - counts.n_persist:
        return "every chunk in host memory has a speculative update"
    if knob == "n_device_sum" and counts.n_device_sum > n_chunks - counts.n_persist:
        return "the sum of every chunk in host memory is on the device"
    if knob == "n_weight_only" and counts.n_weight_only > counts.n_speculate:
        return "no other update is speculative"
    if counts.n_swap + counts.n_ckpt > models.n_blocks:
        return "every block is swapped or checkpointed"
    if knob == "n_ckpt_swap" and counts.n_ckpt_swap > counts.n_ckpt:
        return "the inputs of every recomputed block are offloaded" if counts.n_ckpt else "no block is recomputed"
    return ""
