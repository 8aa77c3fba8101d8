"""Who updates a chunk in host memory once the norm is known: the host, or the GPU (not in the paper).

Updates wait in one queue, in the order in which the next forward needs their chunks. The host takes the first. The GPU
takes the first one that the host would not finish in time and that the GPU would finish sooner, if forward then waits
for less. It may wait for more, as the host is slower while the GPU streams states from the same memory. So a host that
is almost as fast as forward needs it to be is left alone, and a slower host gets help. The engine asks
``first_late`` with the rates that it has measured in this run, and the runtime model with those of calibration. Who
updates a chunk changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What forward must be spared to make help worth it, as a share of what the update takes the host. Streamed updates take
# the link from uploads, too, which is not counted.
_WORTH = 0.2


class Sharing(NamedTuple):
    """What the engine must know to share updates: predictions, until it has measured the rates itself."""

    needed_ms: tuple[float, ...]  # by chunk: from the norm until forward needs its update, if it waits for none
    host_gparams: float  # 1e9 parameters a second
    device_gparams: float
    host_kept: float  # the share of its rate that the host keeps while the GPU updates a chunk in host memory
    staging_bytes: int  # device memory through which the states of a chunk pass


class Waiting(NamedTuple):
    """An update that nobody has begun."""

    host_ms: float  # what it takes the host
    device_ms: float  # what it takes the GPU; infinite if the GPU cannot do it
    needed_ms: float  # when the forward needs the chunk, if it has waited for none before


def first_late(waiting: Sequence[Waiting], now_ms: float, host_free_ms: float, host_kept: float) -> int | None:
    """The index of the update that the GPU takes now, None if it takes none.

    Args:
        waiting: updates in the order in which the host takes them. Their times have the same zero as these:
        now_ms: the present.
        host_free_ms: when the host is done with what it has begun.
        host_kept: the share of its rate that the host keeps beside an update by the GPU, from 0 (exclusive) to 1.
    """
    index, late_ms, end_ms = None, 0.0, max(now_ms, host_free_ms)
    for at, (host_ms, device_ms, needed_ms) in enumerate(waiting):  # thousands of times in a search
        end_ms += host_ms
        if end_ms > needed_ms:
            if end_ms - needed_ms > late_ms:
                late_ms = end_ms - needed_ms
            if index is None and now_ms + device_ms < end_ms:
                index = at
    if index is None:
        return None
    taken = waiting[index]
    back_ms = now_ms + taken.device_ms
    helped_ms, end_ms = back_ms - taken.needed_ms, max(now_ms, host_free_ms)
    for update in (*waiting[:index], *waiting[index + 1 :]):
        beside_ms = max(0.0, min(update.host_ms / host_kept, back_ms - end_ms))
        end_ms += update.host_ms + beside_ms * (1.0 - host_kept)
        helped_ms = max(helped_ms, end_ms - update.needed_ms)
    return index if late_ms - helped_ms > _WORTH * taken.host_ms else None
