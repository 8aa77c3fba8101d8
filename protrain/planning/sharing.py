"""Who updates a chunk in host memory once the norm is known: the host, or the GPU (not in the paper).

Updates wait in one queue, in the order in which the next forward needs their chunks. The host takes the first. The GPU
takes the first one that the host would not finish in time and that the GPU would finish sooner. So a host that is as
fast as the forward needs it to be is left alone, as streamed updates slow it down and take the link. A slower host gets
help. The engine asks :func:`first_late` with the rates that it has measured in this run, and the runtime model with
those of calibration. Who updates a chunk changes no bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Sharing(NamedTuple):
    """What the engine must know to share updates: predictions, until it has measured the rates itself."""

    needed_ms: tuple[float, ...]  # by chunk: from the norm until forward needs its update, if it waits for none
    host_gparams: float  # 1e9 parameters a second
    device_gparams: float
    staging_bytes: int  # device memory through which the states of a chunk pass


class Waiting(NamedTuple):
    """An update that nobody has begun."""

    host_ms: float  # what it takes the host
    device_ms: float  # what it takes the GPU; infinite if the GPU cannot do it
    needed_ms: float  # when the forward needs the chunk, if it has waited for none before


def first_late(waiting: Sequence[Waiting], now_ms: float, host_free_ms: float) -> int | None:
    """The index of the update that the GPU takes now, None if it takes none.

    Args:
        waiting: updates in the order in which the host takes them. Their times have the same zero as these:
        now_ms: the present.
        host_free_ms: when the host is done with what it has begun.
    """
    end_ms = max(now_ms, host_free_ms)
    for index, update in enumerate(waiting):
        end_ms += update.host_ms
        if end_ms > update.needed_ms and now_ms + update.device_ms < end_ms:
            return index
    return None
